package stack

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
)

// Files of the key that signs the heads of the log, in the data folder.
const (
	headsKeyFile    = "heads.key"
	headsPublicFile = "heads.pub" // the public keys of all keys that were ever used, one per line
)

// headsKey sets the key file of the session service, unless the user has set one.
func (s *Stack) headsKey() (err error) {
	if c := &s.cfg.Session; c.HeadsKey == "" && c.HeadsKeyFile == "" {
		c.HeadsKeyFile, err = headsKey(s.cfg.DataDir)
	}
	return err
}

// headsKey returns the file of the private key in a data folder, and creates it at the first start. A lost key is
// replaced by a new one; the signatures of the old key are still verified with its public key.
func headsKey(dir string) (file string, err error) {
	file = filepath.Join(dir, headsKeyFile)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		seed := make([]byte, 32)
		rand.Read(seed) // never fails
		text = []byte(hex.EncodeToString(seed) + "\n")
		err = writeKey(file, string(text))
	}
	if err != nil {
		return "", fmt.Errorf("key of signed heads: %w", err)
	}
	key, err := heads.ParsePrivateKey(string(text))
	if err != nil {
		return "", fmt.Errorf("key of signed heads: %s: %w", file, err)
	}
	path := filepath.Join(dir, headsPublicFile)
	known, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("key of signed heads: %w", err)
	}
	if slices.Contains(strings.Fields(string(known)), key.Public().String()) {
		return file, nil
	}
	if err := writeKey(path, string(known)+key.Public().String()+"\n"); err != nil {
		return "", fmt.Errorf("key of signed heads: %w", err)
	}
	return file, nil
}
