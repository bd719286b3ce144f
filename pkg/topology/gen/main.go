// Command gen writes docs/subjects.md or deploy/nats.conf from package topology; the name of the file decides
// which.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/topology"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: gen FILE")
	}
	write := topology.WriteDocs
	if filepath.Ext(args[0]) == ".conf" {
		write = topology.WriteNATSConf
	}
	f, err := os.Create(args[0])
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		return fmt.Errorf("write %s: %w", args[0], err)
	}
	return f.Close()
}
