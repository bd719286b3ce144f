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

// Dial opens a connection to the proxy's admin socket, by a command in its
// container that joins it to the connection. It makes sure that the proxy runs,
// as Ensure does. ctx bounds the opening alone. Deadlines hold; Close ends the
// command. Each connection costs a process there, and about 60 ms.
func (e *EgressProxy) Dial(ctx context.Context) (net.Conn, error) {
	var err error
	for range 2 {
		var at *egressAt
		if at, err = e.ensured(ctx); err != nil {
			return nil, err
		}
		var proc *process
		if proc, err = e.exec(ctx, at, "dial"); err == nil {
			return newEgressConn(proc), nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) && !errdefs.IsConflict(err) {
			break
		}
		e.forget(at) // it was removed, or stopped
	}
	if errors.Is(err, sandbox.ErrNotFound) { // of no sandbox: nobody should take it for that
		return nil, fmt.Errorf("egress proxy %s: its container goes away: %v", e.Name(), err) //nolint:errorlint // see above
	}
	return nil, fmt.Errorf("egress proxy %s: %w", e.Name(), err)
}

// lastSaid bounds what is kept of a command's stderr, in bytes.
const lastSaid = 4 << 10

// egressConn is a connection through a command's streams. A pipe in between has the deadlines.
type egressConn struct {
	net.Conn // the near end
	far      net.Conn
	proc     *process
	carriers sync.WaitGroup
	cause    atomic.Pointer[error] // of the streams' end; set before the far end is closed
}

func newEgressConn(proc *process) *egressConn {
	c := &egressConn{proc: proc}
	c.Conn, c.far = net.Pipe()
	c.carriers.Go(func() {
		_, _ = io.Copy(proc.Stdin(), c.far) // the other way tells why it ended
		_ = proc.Stdin().Close()            // likewise
	})
	var said strings.Builder
	heard := make(chan struct{})
	c.carriers.Go(func() {
		defer close(heard)
		_, _ = io.CopyN(&said, proc.Stderr(), lastSaid) // its end is stdout's
		_, _ = io.Copy(io.Discard, proc.Stderr())
	})
	c.carriers.Go(func() {
		_, err := io.Copy(c.far, proc.Stdout())
		if errors.Is(err, io.ErrClosedPipe) {
			err = nil // this side was closed
		}
		if err == nil {
			<-heard
			if text := strings.TrimSpace(said.String()); text != "" {
				err = fmt.Errorf("egress proxy %s: %s", proc.b.id, text)
			}
		}
		if err != nil {
			c.cause.Store(&err)
		}
		_ = c.far.Close() // closing a pipe never fails
	})
	return c
}

// Read gives what the proxy sends; after its end, io.EOF, or why the way there ended.
func (c *egressConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, c.because(err, io.EOF)
}

// Write sends.
func (c *egressConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.because(err, io.ErrClosedPipe)
}

// because replaces the pipe's end by its cause.
func (c *egressConn) because(err, end error) error {
	if cause := c.cause.Load(); cause != nil && errors.Is(err, end) {
		return *cause
	}
	return err
}

// Close ends the command, which ends with its stdin, and returns when nothing of the connection is left here.
func (c *egressConn) Close() error {
	err := errors.Join(c.Conn.Close(), c.proc.Kill())
	c.carriers.Wait()
	return err
}
