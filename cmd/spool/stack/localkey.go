package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/services/gateway"
)

// localKeyFile is the name of the file in the data folder with the key with which the user of this machine calls the
// gateway.
const localKeyFile = "local.key"

// loadLocalKey returns the local key of a data folder. It creates the key at the first start. A user who removes the file
// while no stack runs gets another key at the next start, and the gateway refuses the former one.
func loadLocalKey(dir string) (string, error) {
	path := filepath.Join(dir, localKeyFile)
	text, err := os.ReadFile(path)
	if err == nil {
		return strings.TrimSpace(string(text)), nil // the gateway checks it
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("local key: %w", err)
	}
	key, err := gateway.NewKey()
	if err == nil {
		err = writePrivateFile(path, key+"\n")
	}
	if err != nil {
		return "", fmt.Errorf("local key: %w", err)
	}
	return key, nil
}
