// Package serve is the runner's Unix socket: followers attach to the journal, send commands and detach. The supervisor
// never waits for them.
package serve

import (
	"bufio"
	"bytes"
	"context"
	"crypto/subtle"
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

// Limits of the server.
const (
	// firstLineWithin is the maximum time that a connection may take to send its first line.
	firstLineWithin = 10 * time.Second
	// lastLinesTimeout is the maximum time that a follower may take to read the last lines at shutdown.
	lastLinesTimeout = 2 * time.Second
	// acceptPause is the pause after a failure to accept a connection.
	acceptPause = 100 * time.Millisecond
	// lineBuffer is the size of a connection's read buffer in bytes.
	lineBuffer = 64 << 10
	// maxSocketPath is the longest path of a Unix socket, in bytes.
	maxSocketPath = 107
)

// Config configures the Server of the runner's socket.
type Config struct {
	Socket     string // path
	Supervisor *supervisor.Supervisor
	Journal    *journal.Journal
	// Claimed is called before the runner accepts a secret. It makes sure that the agent's processes, which start
	// later, cannot read this process. nil does nothing.
	Claimed func()
	Log     *slog.Logger
}

// Server accepts connections on the runner's socket. It sends the journal to the attached follower, and passes the
// follower's commands to the supervisor.
type Server struct {
	cfg      Config
	listener *net.UnixListener
	shutdown context.CancelFunc // asks Run to end

	mu        sync.Mutex
	epoch     uint64 // the highest so far
	secret    string // the secret that followers prove to know; "" until the runner is claimed
	attached  bool   // a follower was attached once
	follower  *follower
	conns     map[net.Conn]bool
	dismissed bool           // no further connection is served
	wg        sync.WaitGroup // the goroutines of conns; added to under mu and before dismissed only
}

// Listen listens on the socket. It replaces a stale socket, and fails if another runner answers at it.
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

// Run serves until ctx ends or a follower asks for shutdown. It then ends the agent, and gives the follower a short
// time to read the last lines.
func (s *Server) Run(ctx context.Context) error {
	ctx, s.shutdown = context.WithCancel(ctx)
	defer s.shutdown()
	accepting := make(chan error, 1)
	go func() { accepting <- s.accept() }()
	runErr := s.cfg.Supervisor.Run(ctx)
	closeErr := s.listener.Close()
	s.closeConnections()
	s.wg.Wait()
	return errors.Join(runErr, closeErr, <-accepting)
}

// accept serves connections until the listener is closed.
func (s *Server) accept() error {
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Most likely the process is out of file descriptors, which is temporary; the agent continues meanwhile.
			s.cfg.Log.Error("accept a connection", "err", err)
			time.Sleep(acceptPause)
			continue
		}
		s.serve(c)
	}
}

// serve handles a connection in its own goroutine. A connection that was accepted before the listener closed, but comes here after
// closeConnections, is closed: nothing else would ever end its goroutine, and Run waits for it.
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

// forget removes a connection that has ended.
func (s *Server) forget(c net.Conn) {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		s.cfg.Log.Debug("close connection", "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// closeConnections closes every connection, the follower's after the last lines were sent.
func (s *Server) closeConnections() {
	s.mu.Lock()
	f := s.follower
	s.mu.Unlock()
	if f != nil {
		f.finish(lastLinesTimeout)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed = true
	for c := range s.conns {
		_ = c.Close() // forget reports
	}
}

// firstLine is the first line of a connection: either an Attach, which makes the connection a follower, or a single
// command that needs no epoch.
type firstLine struct {
	runner.Attach
	runner.Claim
}

// handle serves a connection. The agent's processes can connect too, also through processes that have ended or that the
// runner did not start, so the peer's process id proves nothing. Once the runner is claimed it obeys only a stream
// whose other end has proved that it knows the secret; the status is open to everyone.
func (s *Server) handle(c *net.UnixConn) {
	if err := c.SetDeadline(time.Now().Add(firstLineWithin)); err != nil {
		return
	}
	conn, in, proved, err := s.acceptProof(c)
	if err != nil {
		s.cfg.Log.Warn("a connection without a proof of the sandbox's secret is refused", "err", err)
		return
	}
	raw, err := readLine(in)
	if err != nil {
		s.refuse(conn, "INVALID_COMMAND", "first line: "+err.Error())
		return
	}
	var hello firstLine
	if err := json.Unmarshal(raw, &hello); err != nil {
		s.refuse(conn, "INVALID_COMMAND", "first line: want {\"epoch\":…,\"after\":…}: "+err.Error())
		return
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return
	}
	if hello.Op != "" {
		s.executeSingle(conn, hello.Claim, proved)
		return
	}
	f := newFollower(s, conn, hello.Attach)
	if refusal := s.admit(f, proved); refusal != nil {
		s.refuse(conn, refusal.Code, refusal.Message)
		return
	}
	f.run(in)
	s.mu.Lock()
	if s.follower == f {
		s.follower = nil
	}
	s.mu.Unlock()
}

// acceptProof returns the stream to use for a connection. If the executor proves the sandbox's secret, that is an encrypted stream
// over the connection, and proved is true; otherwise it is the connection itself.
func (s *Server) acceptProof(c *net.UnixConn) (conn net.Conn, in *bufio.Reader, proved bool, err error) {
	in = bufio.NewReaderSize(c, lineBuffer)
	head, err := in.Peek(1)
	if err != nil || !runner.StartsTLSStream(head[0]) {
		return c, in, false, nil // readLine reports what is wrong
	}
	s.mu.Lock()
	secret := s.secret
	s.mu.Unlock()
	config, err := runner.RunnerTLS(secret)
	if err != nil {
		return nil, nil, false, err
	}
	if conn, err = runner.AcceptSealedStream(c, in, config); err != nil {
		return nil, nil, false, err
	}
	return conn, bufio.NewReaderSize(conn, lineBuffer), true, nil
}

// executeSingle executes the only command of a connection that does not follow, and answers it. proved is true if the peer has proved the
// sandbox's secret.
func (s *Server) executeSingle(c net.Conn, cmd runner.Claim, proved bool) {
	switch cmd.Op {
	case runner.OpClaim:
		if refusal := s.claim(cmd.Secret); refusal != nil {
			s.refuse(c, refusal.Code, refusal.Message)
			return
		}
		s.send(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID}})
	case runner.OpInterrupt:
		if refusal := s.checkProof(proved); refusal != nil {
			s.refuse(c, refusal.Code, refusal.Message)
			return
		}
		s.cfg.Supervisor.Interrupt()
		s.send(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID}})
	case runner.OpStatus:
		st := s.cfg.Supervisor.Status()
		s.send(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID, Status: &st}})
	default:
		s.refuse(c, "FENCED", fmt.Sprintf("op %q needs an attached follower with its epoch", cmd.Op))
	}
}

// claim stores the secret that executors must prove from then on. It refuses with FORBIDDEN if the runner has another secret or was
// followed already: until then no agent runs in its sandbox.
func (s *Server) claim(secret string) *runner.CommandError {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case secret != "" && subtle.ConstantTimeCompare([]byte(secret), []byte(s.secret)) == 1:
		return nil
	case secret == "" || s.secret != "" || s.attached:
		return &runner.CommandError{Code: "FORBIDDEN", Message: "the runner cannot be claimed with this secret"}
	}
	if s.cfg.Claimed != nil {
		s.cfg.Claimed()
	}
	s.secret = secret
	return nil
}

// checkProof refuses with FORBIDDEN if the runner was claimed and the peer has not proved its secret.
func (s *Server) checkProof(proved bool) *runner.CommandError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.checkProofLocked(proved)
}

// checkProofLocked is checkProof for a caller that holds mu.
func (s *Server) checkProofLocked(proved bool) *runner.CommandError {
	if proved || s.secret == "" {
		return nil
	}
	return &runner.CommandError{Code: "FORBIDDEN", Message: "the runner obeys only an executor that proves the sandbox's secret"}
}

// admit makes f the follower in place of the current one, which it ends. It refuses with FENCED if a higher epoch was seen, and with
// FORBIDDEN if the runner was claimed and proved is false: the executor has not proved the sandbox's secret.
func (s *Server) admit(f *follower, proved bool) *runner.CommandError {
	s.mu.Lock()
	defer s.mu.Unlock()
	if refusal := s.checkProofLocked(proved); refusal != nil {
		return refusal
	}
	if f.attach.Epoch < s.epoch {
		return fencedError(f.attach.Epoch, s.epoch)
	}
	s.epoch, s.attached = f.attach.Epoch, true
	if s.follower != nil {
		s.follower.replace()
	}
	s.follower = f
	return nil
}

// fence refuses a command with FENCED if a higher epoch was seen. Otherwise it stores the epoch.
func (s *Server) fence(epoch uint64) *runner.CommandError {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch < s.epoch {
		return fencedError(epoch, s.epoch)
	}
	s.epoch = epoch
	return nil
}

func fencedError(got, highest uint64) *runner.CommandError {
	return &runner.CommandError{Code: "FENCED", Message: fmt.Sprintf("epoch %d is over; the highest seen is %d", got, highest)}
}

// refuse sends an error as the only answer on a connection.
func (s *Server) refuse(c net.Conn, code, message string) {
	s.send(c, runner.Message{Reply: &runner.Reply{Error: &runner.CommandError{Code: code, Message: message}}})
}

// send writes to a connection that is about to be closed.
func (s *Server) send(c net.Conn, m runner.Message) {
	if err := c.SetWriteDeadline(time.Now().Add(lastLinesTimeout)); err != nil {
		return
	}
	if _, err := c.Write(encode(m)); err != nil {
		s.cfg.Log.Debug("answer a connection", "err", err)
	}
}

// encode returns a message as a line.
func encode(m runner.Message) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(m); err != nil {
		return []byte(`{"reply":{"error":{"code":"INTERNAL","message":"cannot encode"}}}` + "\n")
	}
	return buf.Bytes()
}

// readLine reads a line of at most runner.MaxLineLength bytes.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if len(line)+len(piece) > runner.MaxLineLength {
			return nil, fmt.Errorf("longer than %d bytes", runner.MaxLineLength)
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
