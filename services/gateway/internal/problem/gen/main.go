// Command gen writes docs/errors.md; its argument is the file's path.
package main

import (
	"log"
	"os"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: gen FILE")
	}
	if err := os.WriteFile(os.Args[1], []byte(problem.ErrorsMarkdown()), 0o644); err != nil {
		log.Fatal(err)
	}
}
