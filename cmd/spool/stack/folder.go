package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
)

// Connection describes how other processes on this machine reach a running stack. It is stored in the data folder,
// readable only by its owner, while the stack runs.
type Connection struct {
	PID         int    `json:"pid"`
	URL         string `json:"url"`
	GRPCAddr    string `json:"grpcAddr"`
	NATSURL     string `json:"natsUrl"` // URL of NATS with the password of user admin
	DatabaseURL string `json:"databaseUrl"`
	LogKeys     string `json:"logKeys"`  // the keys with which all writers of the log sign commits
	LocalKey    string `json:"localKey"` // the key with which the user of this machine calls the gateway
}

// ErrRunning is returned for a data folder that another stack has locked.
var ErrRunning = errors.New("another Spool runs on this data folder")

// ErrNotRunning is returned for a data folder on which no stack runs.
var ErrNotRunning = errors.New("no Spool runs on this data folder")

const (
	lockFile       = "lock"
	connectionFile = "spool.json"
	lockTimeout    = 200 * time.Millisecond
)

// folderLock is the exclusive lock of a process on a data folder. The kernel releases the lock when the process ends.
type folderLock struct {
	dir  string
	file *flock.Flock
}

// acquireLock creates the data folder dir and locks it. It returns ErrRunning if another stack has locked it.
func acquireLock(dir string) (*folderLock, error) {
	if dir == "" {
		return nil, errors.New("data: name a data folder")
	}
	remedy := "choose another folder with --data, or make this one writable"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data: cannot create %s (%w): %s", dir, err, remedy)
	}
	f := flock.New(filepath.Join(dir, lockFile))
	// isLocked holds the lock for a moment.
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	_, err := f.TryLockContext(ctx, lockTimeout/10)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("data: %w (%s): use `spool run`, which joins it, or choose another folder with --data", ErrRunning, dir)
	}
	if err != nil {
		return nil, fmt.Errorf("data: cannot write to %s (%w): %s", dir, err, remedy)
	}
	l := &folderLock{dir, f}
	// A connection file that a killed stack left behind is no longer valid.
	if err := l.removeConnectionFile(); err != nil {
		return nil, errors.Join(err, f.Unlock())
	}
	return l, nil
}

// removeConnectionFile removes the file that describes how to reach the stack.
func (l *folderLock) removeConnectionFile() error {
	if err := os.Remove(filepath.Join(l.dir, connectionFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("data: cannot remove %s: %w", connectionFile, err)
	}
	return nil
}

// release removes the connection file and unlocks the data folder.
func (l *folderLock) release() error { return errors.Join(l.removeConnectionFile(), l.file.Unlock()) }

// writeConnection writes the connection file of the data folder dir, which it replaces atomically.
func writeConnection(dir string, c Connection) error {
	b, err := json.MarshalIndent(c, "", " ")
	if err != nil {
		return fmt.Errorf("connection file: %w", err)
	}
	tmp := filepath.Join(dir, "."+connectionFile)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("connection file: %w", err)
	}
	return os.Rename(tmp, filepath.Join(dir, connectionFile))
}

// FindRunning returns how to reach the stack that runs on a data folder, or ErrNotRunning.
func FindRunning(dir string) (Connection, error) {
	var c Connection
	held, err := isLocked(dir)
	if err != nil || !held {
		return c, errors.Join(err, fmt.Errorf("%w (%s)", ErrNotRunning, dir))
	}
	b, err := os.ReadFile(filepath.Join(dir, connectionFile))
	if errors.Is(err, os.ErrNotExist) {
		return c, fmt.Errorf("%w (%s): it is still starting", ErrNotRunning, dir)
	}
	if err != nil {
		return c, fmt.Errorf("connection file: %w", err)
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, fmt.Errorf("connection file %s: %w", filepath.Join(dir, connectionFile), err)
	}
	return c, nil
}

// isLocked reports whether a process has locked the data folder.
func isLocked(dir string) (bool, error) {
	f := flock.New(filepath.Join(dir, lockFile), flock.SetFlag(os.O_RDONLY))
	free, err := f.TryRLock()
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("data: %w", err)
	}
	return !free, f.Unlock()
}

// DefaultDataDir returns the user's data folder: $XDG_DATA_HOME/spool, or else ~/.local/share/spool.
func DefaultDataDir() (string, error) {
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "spool"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("data: no home folder (%w): choose a folder with --data", err)
	}
	return filepath.Join(home, ".local", "share", "spool"), nil
}
