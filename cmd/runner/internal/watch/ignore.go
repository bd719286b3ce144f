package watch

// IgnoreFile is the file of the workspace's root that says, in the syntax of
// gitignore, what no events are made of.
const IgnoreFile = ".spoolignore"

// maxIgnore bounds it in bytes.
const maxIgnore = 64 << 10

// ignoredAnyway comes before the rules of IgnoreFile, which may take them back.
const ignoredAnyway = ".git\nnode_modules\n__pycache__\n.venv\n*.swp\n.spool-put-*\n"
