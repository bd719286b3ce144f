package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
)

// stringList is the value of a flag: a list of strings in JSON, so that an element can begin with a dash or be empty.
type stringList []string

// UnmarshalText parses a JSON list of strings.
func (w *stringList) UnmarshalText(raw []byte) error { return json.Unmarshal(raw, (*[]string)(w)) }

// mcpServeCommand is the command mcp-serve, the first process in the container of an MCP sidecar: it starts the MCP
// server for each connection to its socket.
type mcpServeCommand struct {
	Socket     string      `required:"" help:"Path of the Unix socket; sockets beside it at which nobody answers are removed."`
	Entrypoint stringList  `help:"The server's program and its first arguments, as a JSON list." default:"[]"`
	Cmd        stringList  `help:"Further arguments where a connection brings none, as a JSON list." default:"[]"`
	Scratch    []string    `help:"Folders that are emptied when nothing is connected any more." sep:","`
	Egress     egressFlags `embed:"" prefix:"egress-"`
}

func (c *mcpServeCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	c.Egress.hostsOnly = true
	out, err := c.Egress.openForwarder(ctx, sys, log)
	if err != nil {
		return err
	}
	environ := withoutRunnerVariables(sys.Environ)
	if out != nil {
		url := "http://" + out.Addr().String()
		environ = append(environ, "HTTP_PROXY="+url, "HTTPS_PROXY="+url, "http_proxy="+url, "https_proxy="+url,
			"NO_PROXY=127.0.0.1,localhost", "no_proxy=127.0.0.1,localhost")
	}
	processGroup := process.NewGroup(log)
	server, err := mcpsidecar.Listen(mcpsidecar.Config{
		Socket: c.Socket, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Environ: environ, Scratch: c.Scratch, ProcessGroup: processGroup, Log: log,
	})
	if err != nil {
		return err
	}
	if err := processGroup.AdoptOrphans(); err != nil {
		log.Warn("orphans of servers are not adopted", "err", err)
	}
	defer ignoreHangups()()
	log.Info("serving", "socket", c.Socket)
	return (&agentRuntime{processGroup: processGroup}).runWithReaping(ctx, func(whole context.Context) error {
		whole, stop := context.WithCancel(whole)
		forwarded := make(chan error, 1)
		go func() {
			var err error
			if out != nil {
				err = out.Run(whole)
			}
			forwarded <- err
		}()
		err := server.Run(ctx)
		stop()
		return errors.Join(err, processGroup.KillAll(), <-forwarded)
	})
}

// mcpWaitReadyCommand is the command mcp-ready, which waits until mcp-serve accepts connections at its socket.
type mcpWaitReadyCommand struct {
	Socket string        `required:"" help:"Path of the server's socket."`
	Within time.Duration `help:"How long to wait." default:"30s"`
}

func (c *mcpWaitReadyCommand) Run(ctx context.Context) error {
	if err := mcpsidecar.AwaitReady(ctx, c.Socket, c.Within); err != nil {
		return fmt.Errorf("not ready within %s: %w", c.Within, err)
	}
	return nil
}

// mcpJoinCommand is the command mcp-join, which takes the place of an MCP server that runs in another container: an
// agent starts it, and it connects stdin, stdout and stderr to the server.
type mcpJoinCommand struct {
	Socket string        `required:"" help:"Path of the server's socket."`
	Env    []string      `help:"Name of a variable that the server gets." sep:"none"`
	Within time.Duration `help:"How long the server's container may take to answer." default:"10s"`
	Args   []string      `arg:"" optional:"" passthrough:"" help:"Arguments in place of the image's own, after --."`
}

func (c *mcpJoinCommand) Run(ctx context.Context, sys *System) error {
	env := map[string]string{}
	for _, name := range c.Env {
		env[name] = sys.Getenv(name)
	}
	args := c.Args
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	code, err := mcpsidecar.Join(ctx, mcpsidecar.JoinConfig{
		Socket: c.Socket, Args: args, Env: env, Within: c.Within, Stdin: sys.Stdin, Stdout: sys.Stdout, Stderr: sys.Stderr,
	})
	switch {
	case err != nil:
		return exitCodeError{err, code}
	case code != 0:
		return silentExit(code)
	}
	return nil
}
