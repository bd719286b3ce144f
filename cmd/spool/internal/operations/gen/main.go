// Command gen writes docs/operations.md, and the generated settings into
// deploy/compose.yaml; its arguments are the files' paths.
package main

import (
	"log"
	"os"

	"github.com/spoolhq/spool/cmd/spool/internal/operations"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: gen OPERATIONS.md COMPOSE.yaml")
	}
	text, err := operations.GenerateMarkdown()
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(os.Args[1], []byte(text), 0o644); err != nil {
		log.Fatal(err)
	}
	compose, err := os.ReadFile(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	if compose, err = operations.GenerateCompose(compose); err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(os.Args[2], compose, 0o644); err != nil {
		log.Fatal(err)
	}
}
