// Package pgserver runs a private Postgres, for `spool up` without SPOOL_DATABASE_URL and for tests.
//
// It listens only on a Unix socket in a folder that only its user and root can enter, so it needs no port, and a
// password only against programs of the same user (Config.RequirePassword). It ends with its owner: by Stop, or by the kernel when the owner is killed (on Linux). A postmaster that still
// runs on the data folder after its owner ended is stopped and not adopted: only then are its settings, its socket and
// its end under control.
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

	"github.com/gofrs/flock"
	"github.com/jackc/pgx/v5"
)

const (
	// User is the superuser of the cluster.
	User = "spool"
	// Database is the database of Server.URL.
	Database = "spool"

	postgresPort        = "5432"
	defaultStartTimeout = 60 * time.Second
	defaultStopTimeout  = 30 * time.Second
)

var (
	// ErrInUse is returned by Start when a living process owns the data folder.
	ErrInUse = errors.New("the data folder is in use by another process")
	// ErrNoBinary is returned by Start if there is no Postgres on the machine and none could be downloaded.
	ErrNoBinary = errors.New("no Postgres binary found")
)

// Config configures a Server. Only DataDir is required.
type Config struct {
	// DataDir is the folder of all persistent data: the cluster, its lock and downloaded binaries.
	DataDir string
	// BinDir is the folder with initdb and postgres. If it is empty, Start searches the PATH and the folders of
	// packages, and then downloads a release into DataDir.
	BinDir string
	// FetchURL is the Maven repository for downloads; empty means Maven Central, FetchNever forbids downloads.
	FetchURL string
	// FetchDir is the folder of downloads; empty means a folder in DataDir, or for root one that other users can
	// enter.
	FetchDir string
	// RequirePassword makes the server require a random password of all roles, against programs of the same user, such as
	// local agents. Start creates it in DataDir at the first start; the roles other than User must be created with it.
	RequirePassword bool
	// Fast disables fsync in initdb and the server, for tests.
	Fast bool
	// Settings are additional server settings (names of postgresql.conf), such as max_connections.
	Settings map[string]string
	// StartTimeout bounds the time until connections are accepted, recovery included; 0 means 60 s.
	StartTimeout time.Duration
	// StopTimeout bounds the fast shutdown, after which the server is stopped at once (it recovers at the next start); 0
	// means 30 s.
	StopTimeout time.Duration
	// Logger receives the output of Postgres; nil discards it.
	Logger *slog.Logger

	search []string // replaces the PATH and the installation folders in tests
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
		if slices.Contains([]string{"listen_addresses", "unix_socket_directories", "unix_socket_permissions", "port", "fsync", "hba_file"}, name) {
			return fmt.Errorf("postgres: Settings must not contain %s, which pgserver sets itself", name)
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
	lock    *flock.Flock
	cluster *os.File // the data folder, passed to Postgres as an open file: see pathForPostgres
	socket  string
	// password is the password of all roles; "" if none is required.
	password string
	user     postgresAccount
	proc     *postmaster
	tail     *outputWriter

	stopOnce sync.Once
	stopErr  error
}

// Start creates the cluster if there is none, runs Postgres on it, and returns when Postgres accepts connections. ctx
// limits only the start. As root, Start runs Postgres as another user, since Postgres refuses to run as root.
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
	if s.user, err = unprivilegedAccount(); err != nil {
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
	if err := s.requirePassword(ctx, bins); err != nil {
		return nil, err
	}
	if err := s.openSocketDir(); err != nil {
		return nil, err
	}
	if err := s.startPostmaster(bins); err != nil {
		return nil, err
	}
	if err := s.waitReady(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// URL returns the URL, for pgx, of the database spool as the superuser.
func (s *Server) URL() string { return s.DatabaseURL(Database) }

// Password returns the password of all roles; "" if Config.RequirePassword is not set.
func (s *Server) Password() string { return s.password }

// RoleURL returns the URL of the database spool as another role.
func (s *Server) RoleURL(role string) string { return s.databaseURL(role, Database) }

// DatabaseURL returns the URL of another database of the server, as the superuser.
func (s *Server) DatabaseURL(name string) string { return s.databaseURL(User, name) }

func (s *Server) databaseURL(role, database string) string {
	q := url.Values{"host": {s.socket}, "port": {postgresPort}, "sslmode": {"disable"}}
	user := url.User(role)
	if s.password != "" {
		user = url.UserPassword(role, s.password)
	}
	u := url.URL{Scheme: "postgres", User: user, Path: "/" + database, RawQuery: q.Encode()}
	return u.String()
}

// PID returns the process id of the postmaster.
func (s *Server) PID() int { return s.proc.pid() }

// Done returns a channel that is closed when Postgres has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} { return s.proc.done }

// Stop performs a fast shutdown of Postgres (open transactions are rolled back, connections closed) and blocks until it
// has ended. After StopTimeout it performs an immediate shutdown. A second call returns the result of the first.
func (s *Server) Stop() error {
	s.stopOnce.Do(func() {
		s.stopErr = errors.Join(s.proc.stop(s.cfg.StopTimeout), s.release())
	})
	return s.stopErr
}

// release removes the socket's folder, and closes the files that lock the data folder.
func (s *Server) release() error {
	var errs []error
	if s.socket != "" {
		errs = append(errs, os.RemoveAll(s.socket), removeIfExists(s.socketRecordFile()))
		s.socket = ""
	}
	if s.cluster != nil {
		errs = append(errs, s.cluster.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Unlock())
	}
	s.cluster, s.lock = nil, nil
	return errors.Join(errs...)
}

// initCluster runs initdb if the folder has no complete cluster. Initdb writes PG_VERSION early, so a separate marker
// file, created after success, distinguishes a complete cluster from an interrupted initdb.
func (s *Server) initCluster(ctx context.Context, bins postgresBinaries) error {
	mark := filepath.Join(s.cfg.DataDir, "initialized")
	if _, err := os.Stat(mark); err == nil {
		return nil
	}
	if err := removeContents(s.clusterDir()); err != nil {
		return fmt.Errorf("postgres: remove the incomplete database in %s: %w", s.clusterDir(), err)
	}
	args := []string{"-D", s.pathForPostgres(), "-U", User, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions"}
	if s.cfg.Fast {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, bins.initdb, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	s.prepareCommand(cmd)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("postgres: initdb in %s: %w: %s", s.cfg.DataDir, err, lastLines(out.String()))
	}
	return os.WriteFile(mark, []byte(bins.initdb+"\n"), 0o600)
}

// startPostmaster starts the postmaster, which accepts connections after waitReady has returned.
func (s *Server) startPostmaster(bins postgresBinaries) error {
	settings := map[string]string{
		"listen_addresses":        "",
		"unix_socket_directories": s.socket,
		"unix_socket_permissions": "0700",
		"port":                    postgresPort,
	}
	if s.cfg.Fast {
		settings["fsync"], settings["synchronous_commit"], settings["full_page_writes"] = "off", "off", "off"
	}
	if s.password != "" {
		settings["hba_file"] = filepath.Join(s.pathForPostgres(), accessFile)
	}
	for k, v := range s.cfg.Settings {
		settings[k] = v
	}
	args := []string{"-D", s.pathForPostgres()}
	for k, v := range settings {
		args = append(args, "-c", k+"="+v)
	}
	cmd := exec.Command(bins.postgres, args...)
	s.tail = &outputWriter{logger: s.logger}
	cmd.Stdout, cmd.Stderr = s.tail, s.tail
	s.prepareCommand(cmd)
	setDeathSignal(cmd, s.cfg.Fast)
	proc, err := startProcess(cmd)
	if err != nil {
		return fmt.Errorf("postgres: start %s: %w", bins.postgres, err)
	}
	s.proc = proc
	return nil
}

// prepareCommand makes cmd run as the unprivileged user with the data folder open.
func (s *Server) prepareCommand(cmd *exec.Cmd) {
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	s.user.runAs(cmd)
	if usesDescriptorPath {
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
			return fmt.Errorf("postgres: ended during the start with data folder %s: %s", s.cfg.DataDir, s.tail.lastOutput())
		case <-ctx.Done():
			return fmt.Errorf("postgres: not ready within %s with data folder %s: %w: %s", s.cfg.StartTimeout, s.cfg.DataDir, last, s.tail.lastOutput())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// ensureDatabase creates the database spool if it does not exist. If it succeeds, the server accepts connections.
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

// clusterVersion returns the major version of Postgres that created the cluster, or "" if there is no cluster.
func clusterVersion(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "PG_VERSION"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func removeIfExists(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func removeContents(dir string) error {
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

// errorWithoutPath returns an error without its operation and path, for a message that already contains them.
func errorWithoutPath(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
