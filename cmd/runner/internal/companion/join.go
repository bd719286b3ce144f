package companion

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
)

// Joint is what a program's stand-in is made from.
type Joint struct {
	Socket string
	Args   []string // in place of those that the image has by itself
	Env    map[string]string
	Within time.Duration // for the server's container to answer

	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Command is by what an agent starts a server that runs in a container, for an
// agent that starts its servers itself and gives them s.Env.
func Command(executable string, s runner.MCPServer) []string {
	words := []string{executable, "mcp-join", "--socket", s.Socket}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		words = append(words, "--env", name)
	}
	return append(append(words, "--"), s.Command...)
}

// redial is how often a container that does not answer is asked again.
const redial = 50 * time.Millisecond

// Join has the server's container run the program, with these streams, and gives
// its exit code. When ctx ends, so does the program.
func Join(ctx context.Context, j Joint) (code int, err error) {
	c, err := dial(ctx, j.Socket, j.Within)
	if err != nil {
		return 1, fmt.Errorf("the MCP server's container does not answer: %w", err)
	}
	defer quietly(c)
	defer context.AfterFunc(ctx, func() { quietly(c) })()
	raw, err := json.Marshal(hello{j.Args, j.Env})
	if err == nil {
		_, err = c.Write(append(raw, '\n'))
	}
	if err != nil {
		return 1, fmt.Errorf("begin with the MCP server: %w", err)
	}
	go func() { // ends with stdin, or with the process
		_, _ = io.Copy(c, j.Stdin) // a broken one shows in the other direction
		_ = c.CloseWrite()         // likewise
	}()
	in, buf := bufio.NewReaderSize(c, maxFrame), make([]byte, maxFrame)
	for {
		kind, data, err := readFrame(in, buf)
		if err != nil {
			return 1, errors.Join(fmt.Errorf("the MCP server's container is gone: %w", err), ctx.Err())
		}
		switch kind {
		case toStdout:
			_, err = j.Stdout.Write(data)
		case toStderr:
			_, err = j.Stderr.Write(data)
		case toEnd:
			return finished(data)
		default:
			err = errMalformed
		}
		if err != nil {
			return 1, err
		}
	}
}

func finished(data []byte) (int, error) {
	var e ended
	if err := json.Unmarshal(data, &e); err != nil {
		return 1, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if e.Error != "" {
		return e.Code, errors.New("the MCP server was not started: " + e.Error)
	}
	return e.Code, nil
}

// Ready waits until a container answers.
func Ready(ctx context.Context, socket string, within time.Duration) error {
	c, err := dial(ctx, socket, within)
	if err != nil {
		return err
	}
	return c.Close()
}

func dial(ctx context.Context, socket string, within time.Duration) (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(redial)
	defer tick.Stop()
	for {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err == nil {
			return c, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}
