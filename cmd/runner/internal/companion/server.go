package companion

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
	// DefaultConnections is how many programs run at a time.
	DefaultConnections = 16
	// DefaultGrace is how long a program may take to end when its stdin has ended, and again when it was asked to.
	DefaultGrace = 2 * time.Second
	// helloWithin is how long a connection may take to say what it wants.
	helloWithin = 10 * time.Second
	// acceptPause is how long the server rests when it cannot take a connection.
	acceptPause = 100 * time.Millisecond
)

// Config is what a Server is made from. Socket, Nursery and Log are required.
type Config struct {
	Socket      string   // path; sockets beside it at which nobody answers are removed
	Entrypoint  []string // the image's: program and first arguments
	Cmd         []string // further ones, where a connection brings none
	Environ     []string // of every program, KEY=value; a connection's own come on top
	Scratch     []string // folders that are emptied when nothing is connected any more
	Connections int      // 0 for DefaultConnections; further ones are refused
	Grace       time.Duration
	Nursery     *process.Nursery
	Log         *slog.Logger
}

// Server starts a program for each connection.
type Server struct {
	cfg      Config
	listener *net.UnixListener
	wg       sync.WaitGroup

	mu   sync.Mutex // held while what is left is cleared away
	open int
}

// Listen takes the socket. The image's program is looked for first.
func Listen(cfg Config) (*Server, error) {
	if len(cfg.Entrypoint) > 0 {
		if _, err := find(cfg.Entrypoint[0]); err != nil {
			return nil, fmt.Errorf("the image's entrypoint: %w", err)
		}
	}
	cfg.Connections, cfg.Grace = cmp.Or(cfg.Connections, DefaultConnections), cmp.Or(cfg.Grace, DefaultGrace)
	if err := sweep(filepath.Dir(cfg.Socket)); err != nil {
		return nil, fmt.Errorf("remove stale sockets: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", cfg.Socket, err)
	}
	// The sandbox has another user; nobody else has the folder.
	if err := os.Chmod(cfg.Socket, 0o666); err != nil { //nolint:gosec // as above
		return nil, errors.Join(fmt.Errorf("open socket to the sandbox: %w", err), l.Close())
	}
	return &Server{cfg: cfg, listener: l}, nil
}

// Run serves until ctx ends; then every program is ended.
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
				quietly(c)
			}
			<-closed
			return closeErr
		case err != nil: // out of descriptors, most likely: it passes
			s.cfg.Log.Error("accept a connection", "err", err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
		default:
			s.wg.Go(func() { s.handle(ctx, c) })
		}
	}
}

// handle serves one connection.
func (s *Server) handle(ctx context.Context, c *net.UnixConn) {
	defer quietly(c)
	defer context.AfterFunc(ctx, func() { quietly(c) })()
	if c.SetReadDeadline(time.Now().Add(helloWithin)) != nil {
		return
	}
	in := bufio.NewReaderSize(c, maxFrame)
	h, err := readHello(in)
	if errors.Is(err, io.EOF) {
		return // somebody looked whether it is there
	}
	out := &frames{to: c}
	if err == nil {
		err = c.SetReadDeadline(time.Time{})
	}
	if err == nil {
		err = s.enter()
	}
	if err != nil {
		s.end(out, ended{Code: 1, Error: err.Error()})
		return
	}
	e := s.run(ctx, h, in, out)
	s.leave() // before its end is told: who joins next finds nothing of it
	s.end(out, e)
}

func (s *Server) end(out *frames, e ended) {
	raw, err := json.Marshal(e)
	if err == nil {
		err = out.write(toEnd, raw)
	}
	if err != nil {
		s.cfg.Log.Debug("tell how the server ended", "err", err)
	}
}

// enter counts a connection.
func (s *Server) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open >= s.cfg.Connections {
		return fmt.Errorf("%d connections are open already, and there may be no more: end some", s.open)
	}
	s.open++
	return nil
}

// leave clears away what is left once nothing is connected: programs that left
// their group, and files, in which there may be what another execution must not see.
func (s *Server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open > 0 {
		return
	}
	if err := s.cfg.Nursery.KillAll(); err != nil {
		s.cfg.Log.Error("end what a server left running", "err", err)
	}
	for _, dir := range s.cfg.Scratch {
		if err := empty(dir); err != nil {
			s.cfg.Log.Error("remove what a server left", "folder", dir, "err", err)
		}
	}
}

// sweep removes the sockets of a folder at which nobody answers any more: each
// server's has another name, and the folder has an end.
func sweep(dir string) error {
	list, err := os.ReadDir(dir)
	for _, e := range list {
		if e.Type()&fs.ModeSocket == 0 {
			continue
		}
		path := filepath.Join(dir, e.Name())
		c, derr := net.Dial("unix", path)
		switch {
		case derr == nil:
			quietly(c)
		case errors.Is(derr, syscall.ECONNREFUSED):
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}

// empty removes what is in a folder.
func empty(dir string) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// command is the program of a connection.
func (s *Server) command(h hello) ([]string, error) {
	args := h.Args
	if len(args) == 0 {
		args = s.cfg.Cmd
	}
	all := slices.Concat(s.cfg.Entrypoint, args)
	if len(all) == 0 {
		return nil, errors.New("its image names no program: give one as command")
	}
	path, err := find(all[0])
	all[0] = path
	return all, err
}

func quietly(c io.Closer) { _ = c.Close() } // what is closed twice, or breaks meanwhile, has ended
