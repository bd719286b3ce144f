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

type options struct {
	Listen string `default:"127.0.0.1:7799" env:"SPOOL_MOCKLLM_LISTEN" help:"Address to listen on."`
	Script string `env:"SPOOL_MOCKLLM_SCRIPT" type:"path" help:"Script in YAML or JSON; without one, the built-in script."`
}

func main() {
	var o options
	kong.Parse(&o, kong.Name("mockllm"), kong.Description("A scripted model server: Anthropic Messages, OpenAI Responses and Chat Completions."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := server.Main(ctx, o.Listen, o.Script, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}
