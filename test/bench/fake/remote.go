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

// request is the first line of a connection from a Remote to Serve.
type request struct {
	Sandbox string
	Attach  *runner.Attach // nil to end the sandbox
}

// NewRemote returns a provider whose runners are in the process that serves a unix socket with Serve.
func NewRemote(socket string) *Provider {
	return newProvider(func(id string) boxRunner { return &socketRunner{id, socket} })
}

// socketRunner is a runner in another process, which is reached over a Unix socket.
type socketRunner struct{ id, socket string }

func (r *socketRunner) attach(a runner.Attach) (sandbox.Process, error) {
	conn, err := r.dial(request{r.id, &a})
	if err != nil {
		return nil, err
	}
	return &socketStream{UnixConn: conn, closed: make(chan struct{})}, nil
}

// end ends the runner. The end of its process ends it too.
func (r *socketRunner) end() {
	if conn, err := r.dial(request{Sandbox: r.id}); err == nil {
		_ = conn.Close() // the request is written
	}
}

func (r *socketRunner) dial(q request) (*net.UnixConn, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("runners' process: %w", err)
	}
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return nil, errors.Join(fmt.Errorf("runners' process: %w", err), conn.Close())
	}
	return conn, nil
}

// socketStream is the process of one `runner attach`, whose streams are a connection to the process of the runners.
type socketStream struct {
	*net.UnixConn
	once   sync.Once
	closed chan struct{}
}

func (s *socketStream) Stdin() io.WriteCloser { return writeHalf{s.UnixConn} }
func (s *socketStream) Stdout() io.Reader     { return s }
func (s *socketStream) Stderr() io.Reader     { return strings.NewReader("") }
func (s *socketStream) Wait() (int, error)    { <-s.closed; return 0, nil }

// Read reads the runner's output. At the end of the output, or after an error, Wait returns.
func (s *socketStream) Read(b []byte) (int, error) {
	n, err := s.UnixConn.Read(b)
	if err != nil {
		s.once.Do(func() { close(s.closed) })
	}
	return n, err
}

func (s *socketStream) Kill() error {
	s.once.Do(func() { close(s.closed) })
	return s.Close()
}

// writeHalf is a connection whose Close ends only the direction in which it writes.
type writeHalf struct{ *net.UnixConn }

func (w writeHalf) Close() error { return w.CloseWrite() }

// Serve plays runners with a script for the Remote of another process, until ctx ends.
func Serve(ctx context.Context, l net.Listener, script Script) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept returns the error
	defer stop()
	s := &server{script: script, runners: map[string]*fakeRunner{}}
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection to a runner: %w", err)
		}
		go s.serve(conn) // ends with the connection
	}
}

// server plays the runners of all sandboxes for the connections that Serve accepts.
type server struct {
	script  Script
	mu      sync.Mutex
	runners map[string]*fakeRunner // by sandbox
}

// serve answers the request of a connection.
func (s *server) serve(conn net.Conn) {
	in := bufio.NewReaderSize(conn, 512)
	line, err := in.ReadBytes('\n')
	var q request
	if err != nil || json.Unmarshal(line, &q) != nil {
		_ = conn.Close() // the other process has ended
		return
	}
	s.mu.Lock()
	r := s.runners[q.Sandbox]
	if r == nil {
		r = newRunner(s.script, events.Derive(events.KindJournal, q.Sandbox))
		s.runners[q.Sandbox] = r
	}
	if q.Attach == nil {
		delete(s.runners, q.Sandbox)
	}
	s.mu.Unlock()
	if q.Attach == nil {
		_ = conn.Close() // nothing is sent
		r.end()
		return
	}
	if _, err := r.attachTo(*q.Attach, connReader{in, conn}, conn); err != nil {
		_ = conn.Close() // the caller reads the end of the stream
	}
}

// connReader reads a connection through a buffer that may already hold some of its bytes. Close closes the connection.
type connReader struct {
	*bufio.Reader
	io.Closer
}
