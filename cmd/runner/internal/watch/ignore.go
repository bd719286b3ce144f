package watch

import "github.com/spoolhq/spool/pkg/ignore"

// IgnoreFile is the file in the workspace's root with rules, in the syntax of gitignore, for files that no events
// report.
const IgnoreFile = ignore.SpoolFile

// maxIgnoreFile is the largest size of the ignore file in bytes.
const maxIgnoreFile = ignore.MaxFile

// defaultIgnoreRules come before the rules of IgnoreFile, which may negate them.
const defaultIgnoreRules = ignore.Defaults
