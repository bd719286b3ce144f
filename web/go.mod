module github.com/spoolhq/spool/web

go 1.26.0
