package watch

import "github.com/spoolhq/spool/pkg/ignore"

// IgnoreFile is the file of the workspace's root that says, in the syntax of
// gitignore, what no events are made of.
const IgnoreFile = ignore.SpoolFile

// maxIgnore bounds it in bytes.
const maxIgnore = ignore.MaxFile

// ignoredAnyway comes before the rules of IgnoreFile, which may take them back.
const ignoredAnyway = ignore.Defaults
