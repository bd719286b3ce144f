// Command runner is the static binary that goes into every sandbox: it
// supervises agents and journals what they do.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], cli.OS())
	stop()
	os.Exit(code)
}
