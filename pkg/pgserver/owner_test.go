//go:build linux

package pgserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	neturl "net/url"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
)

const ownerEnv = "PGSERVER_TEST_OWNER"

// TestMain also runs the program that owns a server, which the tests below kill.
func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerEnv); dir != "" {
		srv, err := pgserver.Start(context.Background(), pgserver.Config{DataDir: dir, FetchURL: pgserver.FetchNever})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(srv.PID(), srv.URL())
		select {}
	}
	os.Exit(m.Run())
}

// runOwner starts a process that owns a server on dir, and returns the process with the pid and the address of the
// postmaster.
func runOwner(t *testing.T, dir string) (*osexec.Cmd, int, string) {
	t.Helper()
	cmd := osexec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the owner printed %q: %v", line, err)
	}
	first, url, _ := strings.Cut(strings.TrimSpace(line), " ")
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, pid, url
}

func waitGone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(b), ") Z ") {
			return
		}
	}
	t.Fatalf("process %d still runs", pid)
}

func TestServer_EndsWithAKilledOwner(t *testing.T) {
	t.Parallel()
	pgtest.NewDatabase(t) // skips or fails the test if the machine has no Postgres
	dir := t.TempDir()
	owner, pid, url := runOwner(t, dir)
	if err := exec(t, url, "CREATE TABLE kept AS SELECT 1 AS n"); err != nil {
		t.Fatal(err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	waitGone(t, pid)
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir})
	if err := exec(t, srv.URL(), "SELECT n FROM kept"); err != nil {
		t.Fatal(err)
	}
	u, err := neturl.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	if folder := u.Query().Get("host"); !filepath.IsAbs(folder) {
		t.Errorf("the address %q names no socket folder", url)
	} else if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the killed owner's socket folder %q is still there: %v", folder, err)
	}
}

func TestStart_RefusesTheFolderOfALivingOwner(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	_, err := pgserver.Start(t.Context(), pgserver.Config{DataDir: dir})
	if !errors.Is(err, pgserver.ErrInUse) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("got %v", err)
	}
	if err := pgserver.RemoveDataDir(dir); !errors.Is(err, pgserver.ErrInUse) {
		t.Fatalf("Remove: %v", err)
	}
	if err := exec(t, srv.URL(), "SELECT 1"); err != nil {
		t.Fatalf("the owner's server does not work any more: %v", err)
	}
}

// TestStop_UnlocksTheFolderBesideAStartingProcess copies the descriptor of the locked file, as a child process does that
// was forked and has not executed its program yet.
func TestStop_UnlocksTheFolderBesideAStartingProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	copied := false
	for _, link := range links {
		if path, err := os.Readlink(link); err != nil || path != filepath.Join(dir, "lock") {
			continue
		}
		fd, err := strconv.Atoi(filepath.Base(link))
		if err != nil {
			t.Fatal(err)
		}
		child, err := syscall.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Close(child) })
		copied = true
		break
	}
	if !copied {
		t.Fatal("no descriptor of the locked file")
	}
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
}

// TestStart_StopsAPostmasterThatOutlivedItsOwner starts a postmaster without a death signal. This is the situation on
// macOS after the owner was killed.
func TestStart_StopsAPostmasterThatOutlivedItsOwner(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, srv.URL(), "CREATE TABLE kept AS SELECT 1 AS n"); err != nil {
		t.Fatal(err)
	}
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	orphan, err := pgserver.StartOrphan(dir)
	if err != nil {
		t.Fatal(err)
	}
	again := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, again.URL(), "SELECT n FROM kept"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-orphan:
	case <-time.After(10 * time.Second):
		t.Fatal("the orphan still runs")
	}
}

func TestStart_IgnoresAStalePIDFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "cluster"))
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	// Another process of the same user, which is not Postgres, now has the pid of the file. Postgres alone would
	// refuse to start.
	other := osexec.Command("sleep", "600")
	if os.Geteuid() == 0 {
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: st.Uid, Gid: st.Gid}}
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})
	pidFile := filepath.Join(dir, "cluster", "postmaster.pid")
	stale := fmt.Sprintf("%d\n/proc/self/fd/3\n1700000000\n5432\n\n\n", other.Process.Pid)
	if err := os.WriteFile(pidFile, []byte(stale), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(pidFile, int(st.Uid), int(st.Gid)); err != nil {
		t.Fatal(err)
	}
	again := pgtest.StartServer(t, pgserver.Config{DataDir: dir, Fast: true})
	if err := exec(t, again.URL(), "SELECT 1"); err != nil {
		t.Fatal(err)
	}
}
