module github.com/spoolhq/spool/web

go 1.26.0

// Packages of npm may contain Go files.
ignore ./node_modules
