package stack

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
)

// TestHeadsKey_IsCreatedOnceAndReplacedWhenLost tests that the key is
// created once, readable only by its owner, and that after its loss there is a new key, with the public keys of both.
func TestHeadsKey_IsCreatedOnceAndReplacedWhenLost(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	read := func() (private heads.PrivateKey, public string) {
		t.Helper()
		file, err := loadHeadsKey(dir)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("others may read the file: %v, %v", info.Mode(), err)
		}
		if private, err = heads.ParsePrivateKey(string(text)); err != nil {
			t.Fatal(err)
		}
		list, err := os.ReadFile(filepath.Join(dir, headsPublicFile))
		if err != nil {
			t.Fatal(err)
		}
		return private, string(list)
	}
	first, list := read()
	if list != first.Public().String()+"\n" {
		t.Errorf("the public keys are %q, want that of the private key", list)
	}
	if again, same := read(); again.Public().String() != first.Public().String() || same != list {
		t.Error("the next start made another key")
	}
	if err := os.Remove(filepath.Join(dir, headsKeyFile)); err != nil {
		t.Fatal(err)
	}
	second, list := read()
	if list != first.Public().String()+"\n"+second.Public().String()+"\n" {
		t.Errorf("after the key was lost the public keys are %q", list)
	}
	if err := os.WriteFile(filepath.Join(dir, headsKeyFile), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadHeadsKey(dir); err == nil || !strings.Contains(err.Error(), headsKeyFile) {
		t.Errorf("a damaged file: %v", err)
	}
}
