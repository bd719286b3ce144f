package fake

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// runnerRequest is the first line that a socketRunner writes to a new connection, as JSON. It asks Serve to attach to
// the runner of a sandbox, or to end the sandbox.
type runnerRequest struct {
	Sandbox string
	Attach  *runner.Attach // nil to end the sandbox
}

// NewRemoteProvider returns a Provider whose runners are in another process, which accepts connections on a Unix socket
// with Serve.
func NewRemoteProvider(socket string) *Provider {
	return newProvider(func(id string) sandboxRunner { return &socketRunner{id, socket} })
}

// socketRunner is a fake runner in another process, which is reached over a Unix socket.
type socketRunner struct{ id, socket string }

func (r *socketRunner) attach(a runner.Attach) (sandbox.Process, error) {
	conn, err := r.dial(runnerRequest{r.id, &a})
	if err != nil {
		return nil, err
	}
	return &socketAttachment{UnixConn: conn, closed: make(chan struct{})}, nil
}

// terminate makes the other process end the runner. It ignores errors, because a process that has ended has no runners.
func (r *socketRunner) terminate() {
	if conn, err := r.dial(runnerRequest{Sandbox: r.id}); err == nil {
		_ = conn.Close() // the request is written
	}
}

// dial connects to the process of the runners, and sends q as the first line.
func (r *socketRunner) dial(q runnerRequest) (*net.UnixConn, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("runners' process: %w", err)
	}
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return nil, errors.Join(fmt.Errorf("runners' process: %w", err), conn.Close())
	}
	return conn, nil
}

// socketAttachment is the process of one `runner attach`. Its standard streams are a connection to the process of the
// runners.
type socketAttachment struct {
	*net.UnixConn
	once   sync.Once
	closed chan struct{}
}

func (s *socketAttachment) Stdin() io.WriteCloser { return writeCloser{s.UnixConn} }
func (s *socketAttachment) Stdout() io.Reader     { return s }
func (s *socketAttachment) Stderr() io.Reader     { return strings.NewReader("") }
func (s *socketAttachment) Wait() (int, error)    { <-s.closed; return 0, nil }

// Read reads the output of `runner attach`. Wait returns after the end of the output or an error.
func (s *socketAttachment) Read(b []byte) (int, error) {
	n, err := s.UnixConn.Read(b)
	if err != nil {
		s.once.Do(func() { close(s.closed) })
	}
	return n, err
}

func (s *socketAttachment) Kill() error {
	s.once.Do(func() { close(s.closed) })
	return s.Close()
}

// writeCloser is a Unix socket connection whose Close closes only the direction in which this process writes.
type writeCloser struct{ *net.UnixConn }

func (w writeCloser) Close() error { return w.CloseWrite() }

// ServeRunners runs fake runners with a script in this process, until ctx ends. Their Provider is in another process, which
// made it with NewRemoteProvider and connects to l.
func ServeRunners(ctx context.Context, l net.Listener, script Script) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept returns the error
	defer stop()
	s := &runnerServer{script: script, runners: map[string]*fakeRunner{}}
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection to a runner: %w", err)
		}
		go s.serveConn(conn) // ends with the connection
	}
}

// runnerServer holds the fake runners of all sandboxes, for the connections that Serve accepts.
type runnerServer struct {
	script  Script
	mu      sync.Mutex
	runners map[string]*fakeRunner // by sandbox
}

// serveConn reads the request on a connection, and attaches the connection to a runner or ends the runner.
func (s *runnerServer) serveConn(conn net.Conn) {
	in := bufio.NewReaderSize(conn, 512)
	line, err := in.ReadBytes('\n')
	var q runnerRequest
	if err != nil || json.Unmarshal(line, &q) != nil {
		_ = conn.Close() // the other process has ended
		return
	}
	s.mu.Lock()
	r := s.runners[q.Sandbox]
	if r == nil {
		r = newFakeRunner(s.script, events.DeriveID(events.KindJournal, q.Sandbox))
		s.runners[q.Sandbox] = r
	}
	if q.Attach == nil {
		delete(s.runners, q.Sandbox)
	}
	s.mu.Unlock()
	if q.Attach == nil {
		_ = conn.Close() // nothing is sent
		r.terminate()
		return
	}
	if _, err := r.attachTo(*q.Attach, bufferedConn{in, conn}, conn); err != nil {
		_ = conn.Close() // the caller reads the end of the stream
	}
}

// bufferedConn reads a connection through a buffer that may already hold some of its bytes. Close closes the
// connection.
type bufferedConn struct {
	*bufio.Reader
	io.Closer
}
