package stack

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// TestLogKeys_AreCreatedOnceAndDeclaredLostWhenEmptied tests that the keys are created once. If the log is signed, a
// missing file is an error that names the file, and an empty file declares the keys lost.
func TestLogKeys_AreCreatedOnceAndDeclaredLostWhenEmptied(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, logKeysFile)
	if _, _, err := loadLogKeys(dir, true); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("without the file of a signed log: %v", err)
	}
	first, lost, err := loadLogKeys(dir, false)
	if err != nil || lost {
		t.Fatalf("the first start: lost %v, %v", lost, err)
	}
	if keys, err := eventlog.ParseKeys(first, ""); err != nil || keys.MissingRole() != "" {
		t.Errorf("the keys made: no key of %q, %v", keys.MissingRole(), err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others may read the file: %v, %v", info.Mode(), err)
	}
	if again, lost, err := loadLogKeys(dir, true); err != nil || lost || again != first {
		t.Errorf("the next start: other keys %v, lost %v, %v", again != first, lost, err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if renewed, lost, err := loadLogKeys(dir, true); err != nil || !lost || renewed == first || renewed == "" {
		t.Errorf("an empty file: lost %v, %v", lost, err)
	}
}
