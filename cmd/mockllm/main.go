// Command mockllm is a scripted model server for tests and demonstrations.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/mockllm/server"
)

// options holds the parsed command line of mockllm.
type options struct {
	server.Settings

	Serve  struct{} `cmd:"" default:"1" help:"Answer requests (the default)."`
	Health struct{} `cmd:"" help:"Exit with 0 if the one that listens on the address answers, else with 1."`
}

func main() {
	var o options
	command := kong.Parse(&o, kong.Name("mockllm"), kong.Description("A scripted model server: Anthropic Messages, OpenAI Responses and Chat Completions."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := func() error {
		return server.ServeScript(ctx, o.Listen, o.Script, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	}
	if command.Command() == "health" {
		run = func() error { return checkListening(ctx, o.Listen) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}
