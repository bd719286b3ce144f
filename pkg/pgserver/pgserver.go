// Package pgserver runs a private Postgres: the one of `spool up` on a machine that has no SPOOL_DATABASE_URL, and of every test.
//
// It listens on a Unix socket only, in a folder that only its own user and root can enter, so it needs no password and no port.
// It ends with its owner: by Stop, or by the kernel when the owner is killed (on Linux). A postmaster that still runs on the data
// folder although its owner is gone is stopped, not adopted: only so are its settings, its socket and its end certain to be ours.
package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// User is the superuser of the cluster, Database the database that URL names.
	User     = "spool"
	Database = "spool"

	port                = "5432"
	defaultStartTimeout = 60 * time.Second
	defaultStopTimeout  = 30 * time.Second
)

var (
	// ErrInUse is returned by Start when a living process owns the data folder.
	ErrInUse = errors.New("the data folder is in use by another process")
	// ErrNoBinary is returned by Start when there is no Postgres on the machine and none could be fetched.
	ErrNoBinary = errors.New("no Postgres binary found")
)

// Config says how to run Postgres. Only DataDir is required.
type Config struct {
	// DataDir is the folder of everything that lasts: the cluster, its lock and, where they had to be fetched, the binaries.
	DataDir string
	// BinDir is the folder with initdb and postgres; empty means to look on the PATH and where packages put them, then to
	// fetch a release into DataDir.
	BinDir string
	// FetchURL is the Maven repository to fetch from; empty means Maven Central, FetchNever forbids it.
	FetchURL string
	// FetchDir keeps what was fetched; empty means a folder in DataDir, or for root one that other users can enter.
	FetchDir string
	// Fast gives up durability for speed: no fsync, neither by initdb nor by the server. For tests.
	Fast bool
	// Settings are further server settings (postgresql.conf names), such as max_connections.
	Settings map[string]string
	// StartTimeout bounds the time until connections are accepted, recovery included; 0 means 60 s.
	StartTimeout time.Duration
	// StopTimeout bounds the fast shutdown, after which the server is stopped at once (it recovers at the next start); 0 means 30 s.
	StopTimeout time.Duration
	// Logger receives what Postgres prints; nil discards it.
	Logger *slog.Logger

	search []string // in place of the PATH and the installation folders, for tests
}

func (c *Config) validate() error {
	if c.DataDir == "" {
		return errors.New("postgres: DataDir is empty: name the folder that holds the database")
	}
	if c.StartTimeout < 0 || c.StopTimeout < 0 {
		return errors.New("postgres: StartTimeout and StopTimeout must not be negative")
	}
	if c.StartTimeout == 0 {
		c.StartTimeout = defaultStartTimeout
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = defaultStopTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	for name := range c.Settings {
		if slices.Contains([]string{"listen_addresses", "unix_socket_directories", "unix_socket_permissions", "port", "fsync"}, name) {
			return fmt.Errorf("postgres: Settings must not contain %s, which the server sets itself", name)
		}
	}
	abs, err := filepath.Abs(c.DataDir)
	if err != nil {
		return fmt.Errorf("postgres: DataDir %s: %w", c.DataDir, err)
	}
	c.DataDir = abs
	return nil
}

// Server is a running Postgres. It is safe for concurrent use.
type Server struct {
	cfg     Config
	logger  *slog.Logger
	lock    *os.File
	cluster *os.File // the data folder, handed to Postgres as an open file: see clusterPath
	socket  string
	user    account
	proc    *process
	tail    *tailWriter

	stopOnce sync.Once
	stopErr  error
}

// Start makes the cluster when there is none, runs Postgres on it, and returns when it accepts connections. ctx bounds the start
// only. As root it runs Postgres as another user, since Postgres refuses root.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, logger: cfg.Logger.With("component", "postgres")}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if s.user, err = unprivileged(); err != nil {
		return nil, err
	}
	if err := s.openFolder(); err != nil {
		return nil, err
	}
	bins, err := findBinaries(ctx, s.cfg, s.user, clusterVersion(s.clusterDir()))
	if err != nil {
		return nil, err
	}
	if err := s.stopOrphan(); err != nil {
		return nil, err
	}
	if err := s.initCluster(ctx, bins); err != nil {
		return nil, err
	}
	if err := s.openSocketDir(); err != nil {
		return nil, err
	}
	if err := s.launch(bins); err != nil {
		return nil, err
	}
	if err := s.waitReady(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// URL is the address for pgx, of the database spool as its superuser.
func (s *Server) URL() string { return s.DatabaseURL(Database) }

// RoleURL is the address of the database spool as another role, which needs no password.
func (s *Server) RoleURL(role string) string { return s.address(role, Database) }

// DatabaseURL is the address of another database of the same server, as its superuser.
func (s *Server) DatabaseURL(name string) string { return s.address(User, name) }

func (s *Server) address(role, database string) string {
	q := url.Values{"host": {s.socket}, "port": {port}, "sslmode": {"disable"}}
	u := url.URL{Scheme: "postgres", User: url.User(role), Path: "/" + database, RawQuery: q.Encode()}
	return u.String()
}

// PID is the process id of the postmaster.
func (s *Server) PID() int { return s.proc.pid() }

// Done is closed when Postgres has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} { return s.proc.done }

// Stop ends Postgres by a fast shutdown (open transactions are rolled back, connections cut) and waits for it; past StopTimeout it is
// stopped at once. A second call returns the result of the first.
func (s *Server) Stop() error {
	s.stopOnce.Do(func() {
		s.stopErr = errors.Join(s.proc.stop(s.cfg.StopTimeout), s.release())
	})
	return s.stopErr
}

// release gives back everything but the process.
func (s *Server) release() error {
	var errs []error
	if s.socket != "" {
		errs = append(errs, os.RemoveAll(s.socket), removeIfThere(s.socketNote()))
		s.socket = ""
	}
	for _, f := range []*os.File{s.cluster, s.lock} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	s.cluster, s.lock = nil, nil
	return errors.Join(errs...)
}

// initCluster runs initdb when the folder holds no finished cluster. PG_VERSION is written early, so an interrupted initdb is told by
// our own mark, which is made when it has succeeded.
func (s *Server) initCluster(ctx context.Context, bins binaries) error {
	mark := filepath.Join(s.cfg.DataDir, "initialized")
	if _, err := os.Stat(mark); err == nil {
		return nil
	}
	if err := emptyFolder(s.clusterDir()); err != nil {
		return fmt.Errorf("postgres: clear the unfinished database in %s: %w", s.clusterDir(), err)
	}
	args := []string{"-D", s.clusterPath(), "-U", User, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions"}
	if s.cfg.Fast {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, bins.initdb, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	s.prepare(cmd)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("postgres: initdb in %s: %w: %s", s.cfg.DataDir, err, lastLines(out.String()))
	}
	return os.WriteFile(mark, []byte(bins.initdb+"\n"), 0o600)
}

// launch starts the postmaster; waitReady tells when it serves.
func (s *Server) launch(bins binaries) error {
	settings := map[string]string{
		"listen_addresses":        "",
		"unix_socket_directories": s.socket,
		"unix_socket_permissions": "0700",
		"port":                    port,
	}
	if s.cfg.Fast {
		settings["fsync"], settings["synchronous_commit"], settings["full_page_writes"] = "off", "off", "off"
	}
	for k, v := range s.cfg.Settings {
		settings[k] = v
	}
	args := []string{"-D", s.clusterPath()}
	for k, v := range settings {
		args = append(args, "-c", k+"="+v)
	}
	cmd := exec.Command(bins.postgres, args...)
	s.tail = &tailWriter{logger: s.logger}
	cmd.Stdout, cmd.Stderr = s.tail, s.tail
	s.prepare(cmd)
	setDeathSignal(cmd, s.cfg.Fast)
	proc, err := startProcess(cmd)
	if err != nil {
		return fmt.Errorf("postgres: start %s: %w", bins.postgres, err)
	}
	s.proc = proc
	return nil
}

// prepare makes cmd run as the unprivileged user with the data folder open.
func (s *Server) prepare(cmd *exec.Cmd) {
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	s.user.apply(cmd)
	if clusterByDescriptor {
		cmd.ExtraFiles = []*os.File{s.cluster}
	}
}

func (s *Server) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StartTimeout)
	defer cancel()
	var last error
	for {
		if last = s.ensureDatabase(ctx); last == nil {
			return nil
		}
		select {
		case <-s.proc.done:
			return fmt.Errorf("postgres: it ended while starting with data folder %s: %s", s.cfg.DataDir, s.tail.last())
		case <-ctx.Done():
			return fmt.Errorf("postgres: not ready within %s with data folder %s: %w: %s", s.cfg.StartTimeout, s.cfg.DataDir, last, s.tail.last())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// ensureDatabase succeeds when the server serves and the database exists.
func (s *Server) ensureDatabase(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var exists bool
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", Database).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{Database}.Sanitize())
	return err
}

// clusterVersion is the major version that made the cluster, empty when there is none.
func clusterVersion(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "PG_VERSION"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func emptyFolder(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func lastLines(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if len(lines) > 3 {
		lines = lines[len(lines)-3:]
	}
	return strings.Join(lines, "; ")
}

// cause strips the operation and the path, which the sentence around it names already.
func cause(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
