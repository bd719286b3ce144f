package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// Dial opens a connection to the egress proxy's admin socket: it runs a command in the proxy's container that connects the socket
// to the command's stdin and stdout. Like EnsureRunning, it first starts the proxy if necessary. ctx limits only Dial, not the
// connection. The connection supports deadlines, and closing it ends the command. A connection takes about 60 ms to open, and
// needs one process in the container.
func (e *EgressProxy) Dial(ctx context.Context) (net.Conn, error) {
	var err error
	for range 2 {
		var c *egressContainer
		if c, err = e.ensureShared(ctx); err != nil {
			return nil, err
		}
		var proc *process
		if proc, err = e.startEgressProgram(ctx, c, "dial"); err == nil {
			return newEgressConn(proc), nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) && !errdefs.IsConflict(err) {
			break
		}
		e.forgetContainer(c) // the container was removed or stopped
	}
	if errors.Is(err, sandbox.ErrNotFound) { // %v hides sandbox.ErrNotFound: no sandbox is missing
		return nil, fmt.Errorf("egress proxy %s: its container was removed: %v", e.ContainerName(), err) //nolint:errorlint // see above
	}
	return nil, fmt.Errorf("egress proxy %s: %w", e.ContainerName(), err)
}

// maxStderrBytes is the number of bytes of a command's stderr that are kept.
const maxStderrBytes = 4 << 10

// egressConn is a connection to the egress proxy over the stdin and stdout of a command in its container. A net.Pipe between them
// provides deadlines.
type egressConn struct {
	net.Conn // the caller's end of the pipe
	far      net.Conn
	proc     *process
	copiers  sync.WaitGroup
	cause    atomic.Pointer[error] // why the streams ended; set before far is closed
}

// newEgressConn returns a connection over the stdin and stdout of proc.
func newEgressConn(proc *process) *egressConn {
	c := &egressConn{proc: proc}
	c.Conn, c.far = net.Pipe()
	c.copiers.Go(func() {
		_, _ = io.Copy(proc.Stdin(), c.far) // the copy of stdout records the error
		_ = proc.Stdin().Close()            // the same
	})
	var stderr strings.Builder
	stderrRead := make(chan struct{})
	c.copiers.Go(func() {
		defer close(stderrRead)
		_, _ = io.CopyN(&stderr, proc.Stderr(), maxStderrBytes) // stderr ends when stdout does
		_, _ = io.Copy(io.Discard, proc.Stderr())
	})
	c.copiers.Go(func() {
		_, err := io.Copy(c.far, proc.Stdout())
		if errors.Is(err, io.ErrClosedPipe) {
			err = nil // the caller closed the connection
		}
		if err == nil {
			<-stderrRead
			if text := strings.TrimSpace(stderr.String()); text != "" {
				err = fmt.Errorf("egress proxy %s: %s", proc.b.id, text)
			}
		}
		if err != nil {
			c.cause.Store(&err)
		}
		_ = c.far.Close() // Close of a pipe never fails
	})
	return c
}

// Read reads what the egress proxy sends. After the end it returns io.EOF, or the error that ended the command's streams.
func (c *egressConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, c.causeOf(err, io.EOF)
}

// Write sends bytes to the egress proxy.
func (c *egressConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.causeOf(err, io.ErrClosedPipe)
}

// causeOf returns the error that ended the command's streams if err is the pipe's error end, and err otherwise.
func (c *egressConn) causeOf(err, end error) error {
	if cause := c.cause.Load(); cause != nil && errors.Is(err, end) {
		return *cause
	}
	return err
}

// Close ends the connection's command, and returns when all goroutines of the connection have ended.
func (c *egressConn) Close() error {
	err := errors.Join(c.Conn.Close(), c.proc.Kill())
	c.copiers.Wait()
	return err
}
