package local

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

const (
	testTenant  = "default"
	testSession = "ses_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	// wipeDir is the variable that makes the test binary wipe a session in a folder and exit.
	wipeDir = "SPOOL_TEST_WIPE_DIR"
)

// TestList_RemovesFoldersWithoutARecord: what is left of a sandbox when an executor is killed while it creates or removes the sandbox is
// removed once it is a minute old, since no sandbox is found there. A young folder may become a sandbox.
func TestList_RemovesFoldersWithoutARecord(t *testing.T) {
	t.Parallel()
	p := newProvider(t, Config{Dir: t.TempDir(), Runner: "/bin/true", Engine: "here"})
	remains := func(kind, id, file string, age time.Duration) string {
		t.Helper()
		dir := filepath.Join(p.cfg.Dir, kind, id)
		if err := os.MkdirAll(filepath.Join(dir, "agent"), 0o700); err != nil {
			t.Fatal(err)
		}
		if file != "" {
			if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	gone := []string{
		remains("sandboxes", "sbx_01ARZ3NDEKTSV4RRFFQ69G5FAV", "runner.log", time.Hour),
		remains("states", testSession, "", time.Hour),
	}
	kept := []string{
		remains("sandboxes", "sbx_01ARZ3NDEKTSV4RRFFQ69G5FAW", "runner.log", 0),
		remains("states", "ses_01ARZ3NDEKTSV4RRFFQ69G5FAW", "", 0),
		remains("states", "ses_01ARZ3NDEKTSV4RRFFQ69G5FAX", "transcript", time.Hour), // whose it is is unknown, but it is content
	}
	if _, err := p.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ListWorkspaces(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range gone {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", dir, err)
		}
	}
	for _, dir := range kept {
		if _, err := os.Stat(dir); err != nil {
			t.Error(err)
		}
	}
}

// TestWipe_CanBeRepeatedAfterAKill: an executor is killed while it wipes a session. The session is listed as kept as long as any of the
// agent's records is left, so that the next sweep removes the rest.
func TestWipe_CanBeRepeatedAfterAKill(t *testing.T) {
	labels := sandbox.Labels{Tenant: testTenant, Session: testSession}
	if dir := os.Getenv(wipeDir); dir != "" {
		if err := newProvider(t, Config{Dir: dir, Runner: "/bin/true", Engine: "here"}).RemoveWorkspace(t.Context(), labels); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Parallel()
	const files = 1000
	for round := range 3 {
		p := newProvider(t, Config{Dir: t.TempDir(), Runner: "/bin/true", Engine: "here"})
		if err := os.MkdirAll(p.stateDir(testSession), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := writeJSON(filepath.Join(p.stateDir(testSession), "labels.json"), labels); err != nil {
			t.Fatal(err)
		}
		for i := range files {
			if err := os.WriteFile(filepath.Join(p.stateDir(testSession), fmt.Sprintf("record-%d", i)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestWipe_CanBeRepeatedAfterAKill$")
		cmd.Env = append(os.Environ(), wipeDir+"="+p.cfg.Dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		count := func() int {
			entries, err := os.ReadDir(p.stateDir(testSession))
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			return len(entries)
		}
		for deadline := time.Now().Add(time.Minute); count() > files*(round+1)/5; {
			if time.Now().After(deadline) {
				t.Fatal("nothing was wiped")
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed, or had just ended
		if left := count(); left > 0 {
			if list, err := p.ListWorkspaces(t.Context()); err != nil || len(list) != 1 || list[0] != labels {
				t.Errorf("%d files are left, and the sessions with files are %v, %v", left, list, err)
			}
		}
		if err := p.RemoveWorkspace(t.Context(), labels); err != nil {
			t.Fatal(err)
		}
		if left := count(); left > 0 {
			t.Errorf("%d files are left after the second wipe", left)
		}
	}
}
