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

// setHeadsKey configures the session service to sign heads with the key in the data folder, unless the user has set a
// key.
func (s *Stack) setHeadsKey() (err error) {
	if c := &s.cfg.Session; c.HeadsKey == "" && c.HeadsKeyFile == "" {
		c.HeadsKeyFile, err = loadHeadsKey(s.cfg.DataDir)
	}
	return err
}

// loadHeadsKey returns the path of the private key that signs heads of the log. It creates the key at the first start,
// or if the key is lost. The public keys of earlier keys are kept, so that their signatures can still be verified.
func loadHeadsKey(dir string) (file string, err error) {
	file = filepath.Join(dir, headsKeyFile)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		seed := make([]byte, 32)
		rand.Read(seed) // never fails
		text = []byte(hex.EncodeToString(seed) + "\n")
		err = writePrivateFile(file, string(text))
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
	if err := writePrivateFile(path, string(known)+key.Public().String()+"\n"); err != nil {
		return "", fmt.Errorf("key of signed heads: %w", err)
	}
	return file, nil
}
