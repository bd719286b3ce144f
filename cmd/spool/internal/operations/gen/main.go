// Command gen writes docs/operations.md; its argument is the file's path.
package main

import (
	"log"
	"os"

	"github.com/spoolhq/spool/cmd/spool/internal/operations"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: gen FILE")
	}
	text, err := operations.Markdown()
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(os.Args[1], []byte(text), 0o644); err != nil {
		log.Fatal(err)
	}
}
