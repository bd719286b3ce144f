package stack

import (
	"os"
	"path/filepath"
	"testing"
)

// TestLocalKey_IsCreatedOnceAndReadableByItsOwnerOnly tests that the key stays the same from one start to the next, and that a
// data folder without a key, such as one of an earlier version, gets another one.
func TestLocalKey_IsCreatedOnceAndReadableByItsOwnerOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	load := func() string {
		t.Helper()
		key, err := loadLocalKey(dir)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, localKeyFile)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("others may read the file: %v, %v", info.Mode(), err)
		}
		return key
	}
	first := load()
	if again := load(); again != first {
		t.Errorf("the next start has the key %s, want %s", again, first)
	}
	if err := os.Remove(filepath.Join(dir, localKeyFile)); err != nil {
		t.Fatal(err)
	}
	if other := load(); other == first {
		t.Error("the key that was removed is in use again")
	}
}
