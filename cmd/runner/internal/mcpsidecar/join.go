package mcpsidecar

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

// JoinConfig configures Join, which connects an agent to an MCP server in another container.
type JoinConfig struct {
	Socket string
	Args   []string // in place of the image's own
	Env    map[string]string
	Within time.Duration // maximum time that the server's container may take to answer

	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// JoinCommand returns the command by which an agent connects to an MCP server that runs in another container. The agent
// starts the command with the environment s.Env, as it starts the program of an MCP server of type stdio.
func JoinCommand(executable string, s runner.MCPServer) []string {
	words := []string{executable, "mcp-join", "--socket", s.Socket}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		words = append(words, "--env", name)
	}
	return append(append(words, "--"), s.Command...)
}

// redialPause is the time between two attempts to connect to the container of an MCP server.
const redialPause = 50 * time.Millisecond

// Join runs the program of an MCP server in the server's container with the streams of j, and returns the program's
// exit code. The program ends when ctx ends.
func Join(ctx context.Context, j JoinConfig) (code int, err error) {
	c, err := dialServer(ctx, j.Socket, j.Within)
	if err != nil {
		return 1, fmt.Errorf("the MCP server's container does not answer: %w", err)
	}
	defer closeQuietly(c)
	defer context.AfterFunc(ctx, func() { closeQuietly(c) })()
	raw, err := json.Marshal(helloLine{j.Args, j.Env})
	if err == nil {
		_, err = c.Write(append(raw, '\n'))
	}
	if err != nil {
		return 1, fmt.Errorf("begin with the MCP server: %w", err)
	}
	go func() { // ends with stdin, or with the process
		_, _ = io.Copy(c, j.Stdin) // a broken connection shows when it is read
		_ = c.CloseWrite()         // likewise
	}()
	in, buf := bufio.NewReaderSize(c, maxFrameData), make([]byte, maxFrameData)
	for {
		kind, data, err := readFrame(in, buf)
		if err != nil {
			return 1, errors.Join(fmt.Errorf("the MCP server's container is gone: %w", err), ctx.Err())
		}
		switch kind {
		case streamStdout:
			_, err = j.Stdout.Write(data)
		case streamStderr:
			_, err = j.Stderr.Write(data)
		case streamEnd:
			return parseEndFrame(data)
		default:
			err = errMalformedFrame
		}
		if err != nil {
			return 1, err
		}
	}
}

// parseEndFrame decodes the last frame of a connection, and returns the exit code of the program, or the reason why the
// program was not started as an error.
func parseEndFrame(data []byte) (int, error) {
	var e endFrame
	if err := json.Unmarshal(data, &e); err != nil {
		return 1, fmt.Errorf("%w: %w", errMalformedFrame, err)
	}
	if e.Error != "" {
		return e.Code, errors.New("the MCP server was not started: " + e.Error)
	}
	return e.Code, nil
}

// AwaitReady blocks until the container of an MCP server accepts connections at the socket, for within at most.
func AwaitReady(ctx context.Context, socket string, within time.Duration) error {
	c, err := dialServer(ctx, socket, within)
	if err != nil {
		return err
	}
	return c.Close()
}

// dialServer connects to the socket in the container of an MCP server, and repeats failed attempts for within at most.
func dialServer(ctx context.Context, socket string, within time.Duration) (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(redialPause)
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
