package compose

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/test/compat"
)

// TestBackup_RestoredInstallationContinues tests that, after a backup, the loss of all volumes and a restore by the
// commands of docs/operations.md, sessions are listed, streams resume at old cursors, secrets can be opened,
// workspaces are complete, and the log is sound.
func TestBackup_RestoredInstallationContinues(t *testing.T) { //nolint:paralleltest // the test uses the whole machine
	commands, err := compat.ShellCommands(root+"/docs/operations.md", "### Back up compose")
	if err != nil || len(commands) != 2 {
		t.Fatalf("docs/operations.md has %d blocks of commands, want one that backs up and one that restores: %v", len(commands), err)
	}
	script, err := os.ReadFile("../compat/backup.yaml")
	if err != nil {
		t.Fatal(err)
	}
	scriptFile, backup := filepath.Join(t.TempDir(), "script.yaml"), t.TempDir()
	if err := os.WriteFile(scriptFile, script, 0o644); err != nil { //nolint:gosec // the user of the model server reads the file
		t.Fatal(err)
	}
	p := newProject(t, "SPOOL_MOCKLLM_SCRIPT="+scriptFile)
	p.env = append(p.env, "BACKUP="+backup, "PROJECT="+p.name)
	shell := func(commands string) { t.Helper(); p.run(10*time.Minute, "bash", "-euc", commands) }

	const secret = "value-of-the-secret"
	sum := sha256.Sum256([]byte(secret))
	digest := hex.EncodeToString(sum[:])
	p.run(5*time.Minute, p.compose("up", "--detach", "--no-build")...)
	p.healthy()
	at := server{url: p.url(1)}
	at.key = p.key(at.url)
	environment := map[string]any{"ref": map[string]any{"slug": "staging"}, "spec": map[string]any{"variables": map[string]any{"TOKEN": map[string]any{"secret": true, "value": secret}}}}
	if err := at.call(t.Context(), "POST", "/api/environments", environment, http.StatusOK, nil); err != nil {
		t.Fatal(err)
	}
	all := []*conversation{{}, {}}
	streams := make([]*stream, len(all))
	for i, c := range all {
		var made struct{ SessionID string }
		if err := at.call(t.Context(), "POST", "/api/sessions", map[string]any{"architecture": "spool", "environments": []string{"staging"}}, http.StatusCreated, &made); err != nil {
			t.Fatal(err)
		}
		c.session, streams[i] = made.SessionID, newStream(made.SessionID)
		if err := streams[i].join(t.Context(), at); err != nil {
			t.Fatal(err)
		}
		if end, err := c.turn(t.Context(), at, "keep a note", streams[i]); err != nil || !strings.Contains(string(end.Data), digest) {
			t.Fatalf("%s: ended with %s, %v; want %s in it", c.session, end.Data, err, digest)
		}
		streams[i].leave()
	}

	shell(commands[0])
	p.healthy() // the installation continues after the backup
	p.run(3*time.Minute, p.compose("down", "--volumes")...)
	if left := p.volumes(); len(left) > 0 {
		t.Fatalf("`down --volumes` left %v", left)
	}
	if err := os.Remove(filepath.Join(p.dir, "deploy", ".env")); err != nil {
		t.Fatal(err)
	}
	shell(commands[1])

	at.url = p.url(1)
	p.await("the sessions are listed", 3*time.Minute, func() error { return checkListed(t, at, all) })
	for i, c := range all {
		s := streams[i]
		if err := s.join(t.Context(), at); err != nil {
			t.Fatal(err)
		}
		end, err := c.turn(t.Context(), at, "show the note", s)
		if err != nil || !strings.Contains(string(end.Data), "heron") || !strings.Contains(string(end.Data), digest) {
			t.Errorf("%s: the next turn ended with %s, %v; want heron and %s in it", c.session, end.Data, err, digest)
		}
		log, err := at.events(t.Context(), c.session)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.catchUp(t.Context(), len(log)); err != nil {
			t.Errorf("%s: %v", c.session, err)
		}
		if err := s.compareWithLog(log); err != nil {
			t.Errorf("%s: %v", c.session, err)
		}
		s.leave()
	}
	p.verify(len(all))
}

// checkListed returns an error unless the list of sessions contains all the given ones.
func checkListed(t *testing.T, at server, all []*conversation) error {
	t.Helper()
	var l struct {
		Sessions []struct{ SessionID, Status string }
	}
	if err := at.call(t.Context(), "GET", "/api/sessions", nil, http.StatusOK, &l); err != nil {
		return err
	}
	for _, c := range all {
		if !slices.ContainsFunc(l.Sessions, func(s struct{ SessionID, Status string }) bool { return s.SessionID == c.session && s.Status == "open" }) {
			return fmt.Errorf("%s is not listed: %v", c.session, l.Sessions)
		}
	}
	return nil
}
