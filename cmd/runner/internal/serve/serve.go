// Package serve is the runner's Unix socket: followers attach to the journal,
// send commands and go again; the supervisor never waits for them.
package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/runner"
)

// Bounds of the server.
const (
	// firstLineWithin is how long a connection may take to say what it wants.
	firstLineWithin = 10 * time.Second
	// farewell is how long a follower may take to read the last lines at shutdown.
	farewell = 2 * time.Second
	// acceptPause is how long the server rests when it cannot take a connection.
	acceptPause = 100 * time.Millisecond
	// maxSocketPath is what Unix sockets allow, in bytes.
	maxSocketPath = 107
)

// Config is what a server is made from.
type Config struct {
	Socket     string // path
	Supervisor *supervisor.Supervisor
	Journal    *journal.Journal
	// Trusted tells whether a peer's process may speak to the runner: the agent's
	// own descendants may not, they could fence the executor off. nil trusts all.
	Trusted func(pid int) bool
	Log     *slog.Logger
}

// Server accepts followers.
type Server struct {
	cfg      Config
	listener *net.UnixListener
	shutdown context.CancelFunc // asks Run to end

	mu        sync.Mutex
	epoch     uint64 // the highest seen
	follower  *follower
	conns     map[net.Conn]bool
	dismissed bool           // no further connection is served
	wg        sync.WaitGroup // the goroutines of conns; added to under mu and before dismissed only
}

// Listen takes the socket; a stale one is replaced, one that answers is an error.
func Listen(cfg Config) (*Server, error) {
	if len(cfg.Socket) > maxSocketPath {
		return nil, fmt.Errorf("socket path has %d bytes, a Unix socket allows %d: choose a shorter one", len(cfg.Socket), maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(cfg.Socket), 0o700); err != nil {
		return nil, fmt.Errorf("make folder of socket: %w", err)
	}
	if c, err := net.Dial("unix", cfg.Socket); err == nil {
		return nil, errors.Join(fmt.Errorf("socket %s: another runner serves there", cfg.Socket), c.Close())
	}
	if err := os.Remove(cfg.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", cfg.Socket, err)
	}
	if err := os.Chmod(cfg.Socket, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("protect socket: %w", err), l.Close())
	}
	return &Server{cfg: cfg, listener: l, conns: map[net.Conn]bool{}}, nil
}

// Run serves until ctx ends or a follower asks for shutdown; then the agent is
// ended, and the follower gets a moment to read the last lines.
func (s *Server) Run(ctx context.Context) error {
	ctx, s.shutdown = context.WithCancel(ctx)
	defer s.shutdown()
	accepting := make(chan error, 1)
	go func() { accepting <- s.accept() }()
	runErr := s.cfg.Supervisor.Run(ctx)
	closeErr := s.listener.Close()
	s.dismiss()
	s.wg.Wait()
	return errors.Join(runErr, closeErr, <-accepting)
}

func (s *Server) accept() error {
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Out of descriptors, most likely: it passes, and the agent goes on meanwhile.
			s.cfg.Log.Error("accept a connection", "err", err)
			time.Sleep(acceptPause)
			continue
		}
		s.serve(c)
	}
}

// serve handles a connection in its own goroutine. A connection that was accepted before the listener closed, but comes here after
// dismiss, is closed: nothing else would ever end its goroutine, and Run waits for it.
func (s *Server) serve(c *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dismissed {
		_ = c.Close()
		return
	}
	s.conns[c] = true
	s.wg.Go(func() {
		defer s.forget(c)
		s.handle(c)
	})
}

func (s *Server) forget(c net.Conn) {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		s.cfg.Log.Debug("close connection", "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// dismiss closes every connection, the follower's after it has the last lines.
func (s *Server) dismiss() {
	s.mu.Lock()
	f := s.follower
	s.mu.Unlock()
	if f != nil {
		f.finish(farewell)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed = true
	for c := range s.conns {
		_ = c.Close() // forget reports
	}
}

// first is a connection's first line: Attach, or a single command from inside
// the sandbox (runner interrupt), which needs no epoch and follows nothing.
type first struct {
	runner.Attach
	ID uint64    `json:"id"`
	Op runner.Op `json:"op"`
}

func (s *Server) handle(c *net.UnixConn) {
	if err := c.SetReadDeadline(time.Now().Add(firstLineWithin)); err != nil {
		return
	}
	in := bufio.NewReaderSize(c, 64<<10)
	raw, err := readLine(in)
	if err != nil {
		s.refuse(c, "INVALID_COMMAND", "first line: "+err.Error())
		return
	}
	if s.cfg.Trusted != nil && !s.cfg.Trusted(peer(c)) {
		s.refuse(c, "FORBIDDEN", "a process of the agent may not speak to the runner")
		return
	}
	var hello first
	if err := json.Unmarshal(raw, &hello); err != nil {
		s.refuse(c, "INVALID_COMMAND", "first line: want {\"epoch\":…,\"after\":…}: "+err.Error())
		return
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		return
	}
	if hello.Op != "" {
		s.single(c, hello)
		return
	}
	f := newFollower(s, c, hello.Attach)
	if refusal := s.admit(f); refusal != nil {
		s.refuse(c, refusal.Code, refusal.Message)
		return
	}
	f.run(in)
	s.mu.Lock()
	if s.follower == f {
		s.follower = nil
	}
	s.mu.Unlock()
}

// single answers one command of a caller that holds no epoch.
func (s *Server) single(c net.Conn, cmd first) {
	switch cmd.Op {
	case runner.OpInterrupt:
		s.cfg.Supervisor.Interrupt()
		s.send(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID}})
	case runner.OpStatus:
		st := s.cfg.Supervisor.Status()
		s.send(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID, Status: &st}})
	default:
		s.refuse(c, "FENCED", fmt.Sprintf("op %q needs an attached follower with its epoch", cmd.Op))
	}
}

// admit makes f the follower, in place of the former, unless it is fenced off.
func (s *Server) admit(f *follower) *runner.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.attach.Epoch < s.epoch {
		return fenced(f.attach.Epoch, s.epoch)
	}
	s.epoch = f.attach.Epoch
	if s.follower != nil {
		s.follower.replace()
	}
	s.follower = f
	return nil
}

// fence checks a command's epoch and remembers a higher one.
func (s *Server) fence(epoch uint64) *runner.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch < s.epoch {
		return fenced(epoch, s.epoch)
	}
	s.epoch = epoch
	return nil
}

func fenced(got, highest uint64) *runner.Error {
	return &runner.Error{Code: "FENCED", Message: fmt.Sprintf("epoch %d is over; the highest seen is %d", got, highest)}
}

func (s *Server) refuse(c net.Conn, code, message string) {
	s.send(c, runner.Message{Reply: &runner.Reply{Error: &runner.Error{Code: code, Message: message}}})
}

// send writes to a connection that is about to be closed.
func (s *Server) send(c net.Conn, m runner.Message) {
	if err := c.SetWriteDeadline(time.Now().Add(farewell)); err != nil {
		return
	}
	if _, err := c.Write(encode(m)); err != nil {
		s.cfg.Log.Debug("answer a connection", "err", err)
	}
}

// encode gives a message as a line.
func encode(m runner.Message) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(m); err != nil {
		return []byte(`{"reply":{"error":{"code":"INTERNAL","message":"cannot encode"}}}` + "\n")
	}
	return buf.Bytes()
}

// readLine reads a line of at most runner.MaxLine bytes.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if len(line)+len(piece) > runner.MaxLine {
			return nil, fmt.Errorf("longer than %d bytes", runner.MaxLine)
		}
		line = append(line, piece...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			if err != nil {
				return nil, err
			}
			return bytes.TrimSpace(line), nil
		}
	}
}
