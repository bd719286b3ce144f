package pgserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
)

// maxSocketPath is the maximum length of the path of a Unix socket in bytes: 107 on Linux, 103 on macOS.
const maxSocketPath = 103

const dataFolderRemedy = "choose another data folder, or make this one writable"

func (s *Server) clusterDir() string { return filepath.Join(s.cfg.DataDir, "cluster") }

// pathForPostgres returns the path of the data folder that Postgres is started with. On Linux it names an open file of
// this process: parent folders that the unprivileged user may not enter (root's home with mode 0700, a test's folder)
// then do not matter, and their modes stay unchanged.
func (s *Server) pathForPostgres() string {
	if usesDescriptorPath {
		return "/proc/self/fd/3"
	}
	return s.clusterDir()
}

// openFolder creates the data folder, locks it, and makes the user that runs Postgres the owner of the cluster.
func (s *Server) openFolder() error {
	if err := os.MkdirAll(s.cfg.DataDir, 0o700); err != nil {
		return fmt.Errorf("postgres: cannot create the data folder %s (%w): %s", s.cfg.DataDir, errorWithoutPath(err), dataFolderRemedy)
	}
	if err := s.lockFolder(); err != nil {
		return err
	}
	if err := os.Mkdir(s.clusterDir(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("postgres: cannot write to the data folder %s (%w): %s", s.cfg.DataDir, errorWithoutPath(err), dataFolderRemedy)
	}
	if err := s.user.chown(s.clusterDir()); err != nil {
		return fmt.Errorf("postgres: give %s to user %s (%w): %s", s.clusterDir(), s.user.name, errorWithoutPath(err), dataFolderRemedy)
	}
	var err error
	if s.cluster, err = os.Open(s.clusterDir()); err != nil {
		return fmt.Errorf("postgres: open the data folder %s (%w): %s", s.clusterDir(), errorWithoutPath(err), dataFolderRemedy)
	}
	return nil
}

func (s *Server) lockFolder() error {
	s.lock = flock.New(filepath.Join(s.cfg.DataDir, "lock"))
	locked, err := s.lock.TryLock()
	if err != nil {
		return fmt.Errorf("postgres: cannot write to the data folder %s (%w): %s", s.cfg.DataDir, errorWithoutPath(err), dataFolderRemedy)
	}
	if !locked {
		return fmt.Errorf("postgres: %s: %w: stop it, or choose another data folder", s.cfg.DataDir, ErrInUse)
	}
	return nil
}

// stopOrphan stops a postmaster of the data folder whose owner has ended: this process holds the lock, so no owner is
// alive. It removes a pid file that names no postmaster of this cluster, since Postgres would refuse to start if
// another process has that id by now.
func (s *Server) stopOrphan() error {
	pidFile := filepath.Join(s.clusterDir(), "postmaster.pid")
	pid := readPIDFile(pidFile)
	if pid <= 1 || !isPostmasterOf(pid, s.clusterDir()) {
		return errors.Join(removeIfExists(pidFile), s.removeOldSocket())
	}
	s.logger.Warn("stop a Postgres that outlived its owner", "pid", pid)
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGINT, s.cfg.StopTimeout}, {syscall.SIGQUIT, 10 * time.Second}} {
		if err := syscall.Kill(pid, step.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("postgres: process %d still runs on %s and cannot be stopped (%w): stop it", pid, s.cfg.DataDir, err)
		}
		if awaitExit(pid, s.clusterDir(), step.wait) {
			return s.removeOldSocket()
		}
	}
	return fmt.Errorf("postgres: process %d still runs on %s and does not stop: stop it with kill -QUIT %d", pid, s.cfg.DataDir, pid)
}

// awaitExit blocks until a postmaster has ended or the time wait has passed, and reports whether it has ended. It
// polls, because the postmaster is not a child of this process.
func awaitExit(pid int, cluster string, wait time.Duration) bool {
	deadline := time.Now().Add(wait)
	for time.Now().Before(deadline) {
		if !isPostmasterOf(pid, cluster) {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// readPIDFile returns the postmaster's process id, or 0 if there is none.
func readPIDFile(path string) int {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		return 0
	}
	return pid
}

const socketDirPrefix = "spool-pg-"

// socketRecordFile returns the path of the file that records the folder of the socket. A process that starts after its
// predecessor was killed reads it.
func (s *Server) socketRecordFile() string { return filepath.Join(s.cfg.DataDir, "socket") }

// removeOldSocket removes the socket folder of a predecessor that was killed. It removes only a folder with a name of
// this package.
func (s *Server) removeOldSocket() error {
	b, err := os.ReadFile(s.socketRecordFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("postgres: read %s: %w", s.socketRecordFile(), err)
	}
	dir := string(b)
	if !filepath.IsAbs(dir) || !strings.HasPrefix(filepath.Base(dir), socketDirPrefix) {
		return nil
	}
	return os.RemoveAll(dir)
}

// openSocketDir creates the folder of the Unix socket and records its path.
func (s *Server) openSocketDir() error {
	bases := []string{os.TempDir(), "/tmp"}
	if s.cfg.RequirePassword {
		// Programs that cannot write to the data folder cannot put a socket of their own in the place of this one.
		bases = append([]string{s.cfg.DataDir}, bases...)
	}
	dir, err := makeSocketDir(s.user, bases)
	if err != nil {
		return err
	}
	s.socket = dir
	if err := os.WriteFile(s.socketRecordFile(), []byte(dir), 0o600); err != nil {
		return fmt.Errorf("postgres: cannot write to the data folder %s (%w): %s", s.cfg.DataDir, errorWithoutPath(err), dataFolderRemedy)
	}
	return nil
}

// makeSocketDir creates a folder for the Unix socket in the first of the folders bases whose path is short enough and that
// user can enter: the length of a Unix socket's path is limited.
func makeSocketDir(user postgresAccount, bases []string) (string, error) {
	var reasons []string
	for _, base := range bases {
		if len(base)+len("/"+socketDirPrefix+"0123456789/.s.PGSQL."+postgresPort) > maxSocketPath {
			reasons = append(reasons, base+" is too long")
			continue
		}
		if !user.canEnter(base) {
			reasons = append(reasons, base+" cannot be entered by user "+user.name)
			continue
		}
		dir, err := os.MkdirTemp(base, socketDirPrefix)
		if err == nil {
			err = user.chown(dir)
		}
		if err != nil {
			reasons = append(reasons, err.Error())
			continue
		}
		return dir, nil
	}
	return "", fmt.Errorf("postgres: no suitable folder for the socket (%s): set TMPDIR to a short path that all users can enter", strings.Join(reasons, ", "))
}

// RemoveDataDir deletes a Postgres data folder whose owner has ended, and stops a server that still runs on it. It
// returns ErrInUse if the owner is alive.
func RemoveDataDir(dir string) error {
	cfg := Config{DataDir: dir}
	if err := cfg.validate(); err != nil {
		return err
	}
	s := &Server{cfg: cfg, logger: cfg.Logger}
	err := s.lockFolder()
	if err == nil {
		err = s.stopOrphan()
	}
	if err == nil {
		err = os.RemoveAll(dir)
	}
	return errors.Join(err, s.release())
}
