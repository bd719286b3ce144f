package compat_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/compat"
)

// TestBackup_RestoredElsewhereOpensSecrets tests that a backup by the steps of docs/operations.md contains everything
// that Spool needs to continue in another folder: its keys, its sessions, their workspaces, and the key that opens
// their secrets.
func TestBackup_RestoredElsewhereOpensSecrets(t *testing.T) {
	t.Parallel()
	const secret, root = "value-of-the-secret", "root-key-of-the-backup-test-0123456789"
	commands, err := compat.ShellCommands("../../docs/operations.md", "### Back up `spool up`")
	if err != nil {
		t.Fatal(err)
	}
	if len(commands) != 2 {
		t.Fatalf("docs/operations.md has %d blocks of commands, want one that backs up and one that restores", len(commands))
	}
	bin, dir := build(t), t.TempDir()
	const script = "backup.yaml"
	data, restored, backup := filepath.Join(dir, "data"), filepath.Join(dir, "elsewhere", "data"), filepath.Join(dir, "backup.tar.gz")
	run := func(command string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-euc", command)
		cmd.Env = append(os.Environ(), "DATA="+data, "BACKUP="+backup, "RESTORED="+restored)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	up := func(data string) *compat.Server {
		t.Helper()
		s, err := compat.StartServer(context.Background(), compat.Config{Spool: bin, Data: data, Script: script, RootKey: root})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	key, session := "", ""
	turn := func(s *compat.Server, content string, says ...string) {
		t.Helper()
		var a struct{ ExecutionID string }
		if err := s.CallAPI(key, "POST", "/api/sessions/"+session+"/messages", map[string]any{"content": content}, &a); err != nil {
			t.Fatal(err)
		}
		end, err := s.AwaitEvent(key, session, 0, func(w events.WireEvent) bool { return w.ExecutionID == a.ExecutionID && events.IsTerminal(w.Type) })
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range says {
			if end.Type != (events.ExecutionCompleted{}).EventType() || !strings.Contains(string(end.Data), want) {
				t.Fatalf("%s: ended with %s %s, want %q in it", content, end.Type, end.Data, want)
			}
		}
	}
	sum := sha256.Sum256([]byte(secret))
	digest := hex.EncodeToString(sum[:])

	s := up(data)
	stop := func() {
		if err := s.Stop(); err != nil {
			t.Errorf("spool up ended with: %v", err)
		}
	}
	func() {
		defer stop()
		var made struct{ Key, SessionID string }
		if err := s.CallAPI(root, "POST", "/api/keys", map[string]any{"name": "mine"}, &made); err != nil {
			t.Fatal(err)
		}
		key = made.Key
		definition := filepath.Join(dir, "staging.yaml")
		if err := os.WriteFile(definition, []byte("kind: environment\nslug: staging\nspec:\n  variables:\n    TOKEN: {secret: true, value: "+secret+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.RunCLI(key, "envs", "apply", "-f", definition); err != nil {
			t.Fatal(err)
		}
		if err := s.CallAPI(key, "POST", "/api/sessions", map[string]any{"architecture": "spool", "environments": []string{"staging"}}, &made); err != nil {
			t.Fatal(err)
		}
		session = made.SessionID
		turn(s, "keep a note", digest)
	}()
	run(commands[0])
	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	run(commands[1])

	s = up(restored)
	defer stop()
	turn(s, "show the note", "heron", digest)
	if out, err := s.RunCLI(key, "verify"); err != nil {
		t.Errorf("verify: %v: %s", err, out)
	}
}
