// Command mockmodal is a local stand-in for Modal's API, for tests.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
	"github.com/spoolhq/spool/cmd/mockmodal/internal/server"
)

// options holds the parsed command line of mockmodal.
type options struct {
	Serve server.Config `cmd:"" help:"Serve until a signal, then remove all containers, networks and images that were made."`
	Guest struct{}      `cmd:"" hidden:"" help:"Start processes in a sandbox. The server runs it in its containers."`
}

func main() {
	var o options
	command := kong.Parse(&o, kong.Name("mockmodal"), kong.Description("A local stand-in for Modal's API, for tests."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := guest.Run
	if command.Command() == "serve" {
		run = func() error {
			return server.Run(ctx, o.Serve, os.Stdout, slog.New(slog.NewTextHandler(os.Stderr, nil)))
		}
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}
