// Command egress is the egress proxy of an engine's sandboxes.
package main

import (
	"os"

	"github.com/spoolhq/spool/services/executor/internal/egress"
)

func main() {
	os.Exit(egress.RunCommandLine(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
