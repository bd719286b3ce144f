package watch

import "github.com/spoolhq/spool/pkg/ignore"

// IgnoreFile is the name of the file in the root of the workspace with rules, in the syntax of gitignore, for files
// whose changes are not reported as events.
const IgnoreFile = ignore.SpoolIgnoreFile

// maxIgnoreFile is the maximum size of the ignore file in bytes.
const maxIgnoreFile = ignore.MaxRulesFileSize

// defaultIgnoreRules are the ignore rules that come before the rules of IgnoreFile, which may negate them.
const defaultIgnoreRules = ignore.DefaultRules
