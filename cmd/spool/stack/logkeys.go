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

// logKeysFile is the name of the file in the data folder with the keys that sign commits of the log.
const logKeysFile = "log.keys"

// loadLogKeys reads the keys that sign commits from the data folder. It creates them at the first start, and also if
// the user has emptied their file, which declares the old keys lost. signed states whether the log has signed commits;
// then a missing file is an error.
func loadLogKeys(dir string, signed bool) (keys string, lost bool, err error) {
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
	keys, err = createLogKeys(path)
	return keys, signed, err
}

// createLogKeys creates a signing key for each writer of the log, writes the keys to a file, and returns the content of
// the file.
func createLogKeys(path string) (string, error) {
	var text strings.Builder
	for _, role := range eventlog.WriterRoles() {
		secret := make([]byte, 32)
		rand.Read(secret) // never fails
		fmt.Fprintf(&text, "%s:%s\n", role, hex.EncodeToString(secret))
	}
	return text.String(), writePrivateFile(path, text.String())
}

// writePrivateFile replaces a file that only its owner can read, and returns after the file is on disk.
func writePrivateFile(path, text string) error {
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
