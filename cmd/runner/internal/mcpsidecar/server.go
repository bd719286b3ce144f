package mcpsidecar

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/process"
)

// The defaults and bounds.
const (
	// DefaultMaxConnections is the default of the maximum number of connections, each of which has its own program.
	DefaultMaxConnections = 16
	// DefaultGraceTime is the default of the time that a program may run after its stdin has ended, and again after
	// SIGTERM.
	DefaultGraceTime = 2 * time.Second
	// helloTimeout is the time limit for a connection to send its first line.
	helloTimeout = 10 * time.Second
	// acceptRetryPause is the pause after a failure to accept a connection.
	acceptRetryPause = 100 * time.Millisecond
)

// Config configures a Server of MCP sidecars. Socket, ProcessGroup and Log are required.
type Config struct {
	Socket       string   // path; other sockets in its folder at which no process listens are removed
	Entrypoint   []string // the image's: program and first arguments
	Cmd          []string // further arguments of a connection that brings none
	Environ      []string // of every program, KEY=value; a connection's own come on top
	Scratch      []string // folders that are emptied when the last connection ends
	Connections  int      // 0 for DefaultMaxConnections; further ones are refused
	Grace        time.Duration
	ProcessGroup *process.Group
	Log          *slog.Logger
}

// Server runs in the container of an MCP server of type docker: it starts the MCP server's program once for each
// connection to its Unix socket.
type Server struct {
	cfg      Config
	listener *net.UnixListener
	wg       sync.WaitGroup

	mu   sync.Mutex // held during the cleanup after the last connection
	open int
}

// Listen starts to listen on the Unix socket. It returns an error if the container's image does not have the program.
func Listen(cfg Config) (*Server, error) {
	if len(cfg.Entrypoint) > 0 {
		if _, err := findProgram(cfg.Entrypoint[0]); err != nil {
			return nil, fmt.Errorf("the image's entrypoint: %w", err)
		}
	}
	cfg.Connections, cfg.Grace = cmp.Or(cfg.Connections, DefaultMaxConnections), cmp.Or(cfg.Grace, DefaultGraceTime)
	if err := removeStaleSockets(filepath.Dir(cfg.Socket)); err != nil {
		return nil, fmt.Errorf("remove stale sockets: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", cfg.Socket, err)
	}
	// The sandbox has another user. No other user can read the folder.
	if err := os.Chmod(cfg.Socket, 0o666); err != nil { //nolint:gosec // as above
		return nil, errors.Join(fmt.Errorf("open socket to the sandbox: %w", err), l.Close())
	}
	return &Server{cfg: cfg, listener: l}, nil
}

// Run serves connections until ctx ends, and then ends every program.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer s.wg.Wait()
	defer cancel()
	var closeErr error
	closed := make(chan struct{})
	defer context.AfterFunc(ctx, func() { defer close(closed); closeErr = s.listener.Close() })()
	for {
		c, err := s.listener.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				closeQuietly(c)
			}
			<-closed
			return closeErr
		case err != nil: // most likely out of file descriptors, which is temporary
			s.cfg.Log.Error("accept a connection", "err", err)
			select {
			case <-time.After(acceptRetryPause):
			case <-ctx.Done():
			}
		default:
			s.wg.Go(func() { s.serveConnection(ctx, c) })
		}
	}
}

// serveConnection serves one connection: it starts the MCP server's program and connects the program's standard
// streams.
func (s *Server) serveConnection(ctx context.Context, c *net.UnixConn) {
	defer closeQuietly(c)
	defer context.AfterFunc(ctx, func() { closeQuietly(c) })()
	if c.SetReadDeadline(time.Now().Add(helloTimeout)) != nil {
		return
	}
	in := bufio.NewReaderSize(c, maxFrameData)
	h, err := readHello(in)
	if errors.Is(err, io.EOF) {
		return // a call of AwaitReady
	}
	out := &frameWriter{to: c}
	if err == nil {
		err = c.SetReadDeadline(time.Time{})
	}
	if err == nil {
		err = s.addConnection()
	}
	if err != nil {
		s.sendEndFrame(out, endFrame{Code: 1, Error: err.Error()})
		return
	}
	e := s.runProgram(ctx, h, in, out)
	s.removeConnection() // before the client learns the end: the next connection must find nothing of this one
	s.sendEndFrame(out, e)
}

// sendEndFrame sends the last frame of a connection. It logs an error.
func (s *Server) sendEndFrame(out *frameWriter, e endFrame) {
	raw, err := json.Marshal(e)
	if err == nil {
		err = out.writeFrames(streamEnd, raw)
	}
	if err != nil {
		s.cfg.Log.Debug("send the end of a program", "err", err)
	}
}

// addConnection counts a new connection, or returns an error if there are too many.
func (s *Server) addConnection() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open >= s.cfg.Connections {
		return fmt.Errorf("%d connections are open already, which is the limit: close one first", s.open)
	}
	s.open++
	return nil
}

// removeConnection counts the end of a connection. After the last one, it kills the processes that are left and empties
// the scratch folders, because the next execution must not see their content.
func (s *Server) removeConnection() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open > 0 {
		return
	}
	if err := s.cfg.ProcessGroup.KillAll(); err != nil {
		s.cfg.Log.Error("end processes that a server left", "err", err)
	}
	for _, dir := range s.cfg.Scratch {
		if err := emptyFolder(dir); err != nil {
			s.cfg.Log.Error("empty a scratch folder", "folder", dir, "err", err)
		}
	}
}

// removeStaleSockets removes those sockets in the folder dir at which no process listens. Every server's socket has
// another name, so that they would fill the folder.
func removeStaleSockets(dir string) error {
	list, err := os.ReadDir(dir)
	for _, e := range list {
		if e.Type()&fs.ModeSocket == 0 {
			continue
		}
		path := filepath.Join(dir, e.Name())
		c, derr := net.Dial("unix", path)
		switch {
		case derr == nil:
			closeQuietly(c)
		case errors.Is(derr, syscall.ECONNREFUSED):
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}

// emptyFolder removes everything in the folder dir.
func emptyFolder(dir string) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// requestedCommand returns the program that a connection requests, with its arguments.
func (s *Server) requestedCommand(h helloLine) ([]string, error) {
	args := h.Args
	if len(args) == 0 {
		args = s.cfg.Cmd
	}
	all := slices.Concat(s.cfg.Entrypoint, args)
	if len(all) == 0 {
		return nil, errors.New("image has no entrypoint: set the server's command")
	}
	path, err := findProgram(all[0])
	all[0] = path
	return all, err
}

// closeQuietly closes c and ignores the error.
func closeQuietly(c io.Closer) { _ = c.Close() } // an error means that it is closed
