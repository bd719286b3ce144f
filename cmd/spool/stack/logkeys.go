package stack

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// logKeysFile is the file in the data folder with the keys that sign commits.
const logKeysFile = "log.keys"

// logKeys reads the keys of a data folder. It creates them at the first start, readable only by their owner, and
// again if the user emptied the file, which declares the keys lost.
func logKeys(dir string, signed bool) (keys string, lost bool, err error) {
	path := filepath.Join(dir, logKeysFile)
	text, err := os.ReadFile(path)
	switch {
	case err == nil && len(text) > 0:
		return string(text), false, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", false, fmt.Errorf("log keys: %w", err)
	case err != nil && signed:
		return "", false, fmt.Errorf("log keys: %s is missing: its keys sign the commits of this log, so restore it from a copy of the data "+
			"folder; if it is lost, create an empty file of that name, and all present commits are accepted as they are", path)
	}
	keys, err = makeLogKeys(path)
	return keys, signed, err
}

// makeLogKeys writes a new key for each role and returns the text of the file after it is on disk.
func makeLogKeys(path string) (string, error) {
	var text strings.Builder
	for _, role := range eventlog.WriterRoles() {
		secret := make([]byte, 32)
		rand.Read(secret) // never fails
		fmt.Fprintf(&text, "%s:%s\n", role, hex.EncodeToString(secret))
	}
	return text.String(), writeKey(path, text.String())
}

// writeKey writes a file that only its owner can read, and returns after it is on disk.
func writeKey(path, text string) error {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	// Commits signed with the key follow soon: the file's name must be on disk before.
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	if err := errors.Join(folder.Sync(), folder.Close()); err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	return nil
}
