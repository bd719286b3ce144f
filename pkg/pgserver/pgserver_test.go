package pgserver_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
)

func exec(t *testing.T, url, sql string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(t.Context()) }()
	_, err = conn.Exec(t.Context(), sql)
	return err
}

func TestStart_KeepsDataOverARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := time.Now()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	t.Logf("first start %s", time.Since(start))
	if err := exec(t, srv.URL(), "CREATE TABLE kept AS SELECT 1 AS n"); err != nil {
		t.Fatal(err)
	}
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	again := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	t.Logf("second start %s", time.Since(start))
	if err := exec(t, again.URL(), "SELECT n FROM kept"); err != nil {
		t.Fatal(err)
	}
}

func TestURL_IsASeparateDatabase(t *testing.T) {
	t.Parallel()
	a, b := pgtest.NewDatabase(t), pgtest.NewDatabase(t)
	if err := exec(t, a, "CREATE TABLE only_here (n int)"); err != nil {
		t.Fatal(err)
	}
	if err := exec(t, b, "SELECT * FROM only_here"); err == nil {
		t.Fatal("a database has the table of another database")
	}
}

func TestStart_ListensOnASocketOnly(t *testing.T) {
	t.Parallel()
	srv := pgtest.StartServer(t, pgserver.Config{Fast: true})
	var addresses, sockets string
	conn, err := pgx.Connect(t.Context(), srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	row := conn.QueryRow(t.Context(), "SELECT current_setting('listen_addresses'), current_setting('unix_socket_directories')")
	if err := row.Scan(&addresses, &sockets); err != nil {
		t.Fatal(err)
	}
	if addresses != "" {
		t.Errorf("listens on %q", addresses)
	}
	info, err := os.Stat(sockets)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("the socket's folder has mode %o", info.Mode().Perm())
	}
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(sockets); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stop left the socket's folder: %v", err)
	}
	select {
	case <-srv.Done():
	default:
		t.Error("Done is open after Stop")
	}
	if err := srv.Stop(); err != nil {
		t.Errorf("second Stop: %v", err)
	}
}

func TestStart_AppliesSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cfg  pgserver.Config
		sql  string
		want string
	}{
		{"durable by default", pgserver.Config{}, "SELECT current_setting('fsync') || current_setting('synchronous_commit')", "onon"},
		{"fast", pgserver.Config{Fast: true}, "SELECT current_setting('fsync') || current_setting('synchronous_commit')", "offoff"},
		{"settings", pgserver.Config{Fast: true, Settings: map[string]string{"max_connections": "33"}}, "SELECT current_setting('max_connections')", "33"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn, err := pgx.Connect(t.Context(), pgtest.StartServer(t, c.cfg).URL())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close(t.Context()) }()
			var got string
			if err := conn.QueryRow(t.Context(), c.sql).Scan(&got); err != nil || got != c.want {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
		})
	}
}

func TestStart_RepeatsAnInterruptedInit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// initdb leaves this folder if the machine stops during initdb.
	if err := os.MkdirAll(filepath.Join(dir, "cluster", "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, srv.URL(), "SELECT 1"); err != nil {
		t.Fatal(err)
	}
}

func TestStart_NamesTheInvalidSetting(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	other := t.TempDir()
	if err := os.Mkdir(filepath.Join(other, "cluster"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "cluster", "PG_VERSION"), []byte("7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  pgserver.Config
		is   error
		want []string
	}{
		"no folder":           {pgserver.Config{}, nil, []string{"DataDir"}},
		"folder is a file":    {pgserver.Config{DataDir: file}, nil, []string{file, "data folder"}},
		"folder not writable": {pgserver.Config{DataDir: "/proc/spool"}, nil, []string{"/proc/spool", "data folder"}},
		"no binary in BinDir": {pgserver.Config{DataDir: t.TempDir(), BinDir: empty}, pgserver.ErrNoBinary, []string{empty, "SPOOL_DATABASE_URL"}},
		"another version":     {pgserver.Config{DataDir: other}, nil, []string{other, "Postgres 7", "postgresql-7"}},
		"negative timeout":    {pgserver.Config{DataDir: empty, StartTimeout: -1}, nil, []string{"StartTimeout"}},
		"a setting of ours":   {pgserver.Config{DataDir: empty, Settings: map[string]string{"port": "1"}}, nil, []string{"port"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv, err := pgserver.Start(t.Context(), c.cfg)
			if err == nil {
				t.Fatalf("no error, %v", srv.Stop())
			}
			wantError(t, err, c.is, c.want...)
		})
	}
}

func TestStart_ReturnsTheErrorOfPostgres(t *testing.T) {
	t.Parallel()
	pgtest.NewDatabase(t) // skips or fails the test if the machine has no Postgres
	for name, value := range map[string]string{"no_such": "1", "max_connections": "many"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv, err := pgserver.Start(t.Context(), pgserver.Config{DataDir: t.TempDir(), Fast: true, Settings: map[string]string{name: value}})
			if err == nil {
				t.Fatalf("no error, %v", srv.Stop())
			}
			wantError(t, err, nil, name)
		})
	}
}

func TestStart_WithoutABinarySaysWhatToDo(t *testing.T) {
	t.Parallel()
	cfg := pgserver.Config{DataDir: t.TempDir(), FetchURL: pgserver.FetchNever}
	_, err := pgserver.Start(t.Context(), cfg.OnBareMachine(t.TempDir()))
	wantError(t, err, pgserver.ErrNoBinary, "no Postgres binary found", "SPOOL_DATABASE_URL", "install")

	repository := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(repository.Close)
	cfg = pgserver.Config{DataDir: t.TempDir(), FetchURL: repository.URL}
	_, err = pgserver.Start(t.Context(), cfg.OnBareMachine(t.TempDir()))
	wantError(t, err, pgserver.ErrNoBinary, "the download failed", "SPOOL_DATABASE_URL", "install")
}

func wantError(t *testing.T, err, is error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if is != nil && !errors.Is(err, is) {
		t.Errorf("%v is not %v", err, is)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not name %q", err, w)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
}
