package watch

import "github.com/spoolhq/spool/pkg/ignore"

// IgnoreFile is the file in the workspace's root with rules, in the syntax of gitignore, for files that no events
// report.
const IgnoreFile = ignore.SpoolIgnoreFile

// maxIgnore is the largest size of the ignore file in bytes.
const maxIgnore = ignore.MaxRulesFileSize

// defaultRules come before the rules of IgnoreFile, which may negate them.
const defaultRules = ignore.DefaultRules
