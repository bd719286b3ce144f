// Command spool is the command line of Spool, and the server that runs all of it in one process.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/cmd/spool/internal/command"
	"github.com/spoolhq/spool/cmd/spool/internal/local"
)

func main() {
	os.Exit(command.Run(context.Background(), os.Args[1:], command.ProcessIO(local.Machine{})))
}
