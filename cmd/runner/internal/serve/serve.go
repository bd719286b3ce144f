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
	// firstLineTimeout is the time limit for a connection to send its first line.
	firstLineTimeout = 10 * time.Second
	// lastLinesTimeout is the time limit for a follower to read the last lines when the runner shuts down.
	lastLinesTimeout = 2 * time.Second
	// acceptRetryPause is the pause after a failure to accept a connection.
	acceptRetryPause = 100 * time.Millisecond
	// readBufferSize is the size of a connection's read buffer in bytes.
	readBufferSize = 64 << 10
	// maxSocketPath is the maximum length in bytes of the path of a Unix socket.
	maxSocketPath = 107
)

// Config configures a Server, which serves the runner's Unix socket.
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

// Listen starts to listen on the Unix socket. It replaces a stale socket, and returns an error if another runner serves it.
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

// Run serves connections and runs the supervisor until ctx ends or a follower requests a shutdown. It then ends the agent, and gives the follower a
// short time to read the last lines.
func (s *Server) Run(ctx context.Context) error {
	ctx, s.shutdown = context.WithCancel(ctx)
	defer s.shutdown()
	accepting := make(chan error, 1)
	go func() { accepting <- s.acceptConnections() }()
	runErr := s.cfg.Supervisor.Run(ctx)
	closeErr := s.listener.Close()
	s.closeConnections()
	s.wg.Wait()
	return errors.Join(runErr, closeErr, <-accepting)
}

// acceptConnections serves connections until the listener is closed.
func (s *Server) acceptConnections() error {
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Most likely the process is out of file descriptors, which is temporary; the agent continues meanwhile.
			s.cfg.Log.Error("accept a connection", "err", err)
			time.Sleep(acceptRetryPause)
			continue
		}
		s.serveConnection(c)
	}
}

// serveConnection handles a connection in its own goroutine. It closes a connection that was accepted before the listener closed but arrives after
// closeConnections: nothing else would ever end the goroutine of that connection, for which Run waits.
func (s *Server) serveConnection(c *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dismissed {
		_ = c.Close()
		return
	}
	s.conns[c] = true
	s.wg.Go(func() {
		defer s.removeConnection(c)
		s.handleConnection(c)
	})
}

// removeConnection removes a connection that has ended from the list of connections.
func (s *Server) removeConnection(c net.Conn) {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		s.cfg.Log.Debug("close connection", "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// closeConnections closes every connection, and that of the follower after the last lines were sent.
func (s *Server) closeConnections() {
	s.mu.Lock()
	f := s.follower
	s.mu.Unlock()
	if f != nil {
		f.sendLastLines(lastLinesTimeout)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed = true
	for c := range s.conns {
		_ = c.Close() // forget reports
	}
}

// firstLineMessage is the first line of a connection: either an Attach, which makes the connection a follower, or a single
// command that needs no epoch.
type firstLineMessage struct {
	runner.Attach
	runner.Claim
}

// handleConnection serves a connection. The agent's processes can connect too, also through processes that have ended or that the runner did not
// start, so the peer's process id proves nothing. Once the runner is claimed it obeys only a stream whose other end has proved that it knows the
// secret; the status is open to everyone.
func (s *Server) handleConnection(c *net.UnixConn) {
	if err := c.SetDeadline(time.Now().Add(firstLineTimeout)); err != nil {
		return
	}
	conn, in, proved, err := s.acceptProof(c)
	if err != nil {
		s.cfg.Log.Warn("a connection without a proof of the sandbox's secret is refused", "err", err)
		return
	}
	raw, err := readLine(in)
	if err != nil {
		s.sendRefusal(conn, "INVALID_COMMAND", "first line: "+err.Error())
		return
	}
	var hello firstLineMessage
	if err := json.Unmarshal(raw, &hello); err != nil {
		s.sendRefusal(conn, "INVALID_COMMAND", "first line: want {\"epoch\":…,\"after\":…}: "+err.Error())
		return
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return
	}
	if hello.Op != "" {
		s.executeSingleCommand(conn, hello.Claim, proved)
		return
	}
	f := newFollower(s, conn, hello.Attach)
	if refusal := s.admitFollower(f, proved); refusal != nil {
		s.sendRefusal(conn, refusal.Code, refusal.Message)
		return
	}
	f.serveCommands(in)
	s.mu.Lock()
	if s.follower == f {
		s.follower = nil
	}
	s.mu.Unlock()
}

// acceptProof returns the stream to use for a connection. If the other end is an executor that proves that it knows the sandbox's secret, the
// result is an encrypted stream over the connection, and proved is true; otherwise it is the connection itself.
func (s *Server) acceptProof(c *net.UnixConn) (conn net.Conn, in *bufio.Reader, proved bool, err error) {
	in = bufio.NewReaderSize(c, readBufferSize)
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
	return conn, bufio.NewReaderSize(conn, readBufferSize), true, nil
}

// executeSingleCommand executes the only command of a connection that is not a follower, and answers it. proved is true if the peer has proved that
// it knows the sandbox's secret.
func (s *Server) executeSingleCommand(c net.Conn, cmd runner.Claim, proved bool) {
	switch cmd.Op {
	case runner.OpClaim:
		if refusal := s.storeSecret(cmd.Secret); refusal != nil {
			s.sendRefusal(c, refusal.Code, refusal.Message)
			return
		}
		s.sendMessage(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID}})
	case runner.OpInterrupt:
		if refusal := s.checkProof(proved); refusal != nil {
			s.sendRefusal(c, refusal.Code, refusal.Message)
			return
		}
		s.cfg.Supervisor.Interrupt()
		s.sendMessage(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID}})
	case runner.OpStatus:
		st := s.cfg.Supervisor.Status()
		s.sendMessage(c, runner.Message{Reply: &runner.Reply{ID: cmd.ID, Status: &st}})
	default:
		s.sendRefusal(c, "FENCED", fmt.Sprintf("op %q needs an attached follower with its epoch", cmd.Op))
	}
}

// storeSecret stores the secret that callers must prove to know from then on. It refuses with FORBIDDEN if the runner has another secret already,
// or if a follower has attached before: the secret must arrive before an agent runs in the sandbox.
func (s *Server) storeSecret(secret string) *runner.CommandError {
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

// checkProof returns FORBIDDEN if the runner was claimed and the peer has not proved that it knows the secret.
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

// admitFollower makes f the follower in place of the current one, whose connection it closes. It returns FENCED if a higher epoch was seen, and
// FORBIDDEN if the runner was claimed and proved is false: the executor has not proved that it knows the sandbox's secret.
func (s *Server) admitFollower(f *follower, proved bool) *runner.CommandError {
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
		s.follower.closeReplaced()
	}
	s.follower = f
	return nil
}

// checkEpoch returns FENCED if a higher epoch than the given one was seen. Otherwise it stores the epoch.
func (s *Server) checkEpoch(epoch uint64) *runner.CommandError {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch < s.epoch {
		return fencedError(epoch, s.epoch)
	}
	s.epoch = epoch
	return nil
}

// fencedError returns the error FENCED for the epoch got, which is lower than highest.
func fencedError(got, highest uint64) *runner.CommandError {
	return &runner.CommandError{Code: "FENCED", Message: fmt.Sprintf("epoch %d is over; the highest seen is %d", got, highest)}
}

// sendRefusal sends an error as the only answer on a connection.
func (s *Server) sendRefusal(c net.Conn, code, message string) {
	s.sendMessage(c, runner.Message{Reply: &runner.Reply{Error: &runner.CommandError{Code: code, Message: message}}})
}

// sendMessage writes a message to a connection that is about to be closed.
func (s *Server) sendMessage(c net.Conn, m runner.Message) {
	if err := c.SetWriteDeadline(time.Now().Add(lastLinesTimeout)); err != nil {
		return
	}
	if _, err := c.Write(encodeMessage(m)); err != nil {
		s.cfg.Log.Debug("answer a connection", "err", err)
	}
}

// encodeMessage returns a message as a line of JSON.
func encodeMessage(m runner.Message) []byte {
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
