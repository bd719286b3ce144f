package hostpath

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// FolderIdentity returns a value that identifies a folder on this machine for this user. Two processes that compute the
// same value see the same folder with the same rights. A process on another machine, in another container or of
// another user computes a different value.
func FolderIdentity(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", unusableFolderError(path, err)
	}
	id, err := fileID(info)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", machineID(), id, os.Geteuid()))
	return hex.EncodeToString(sum[:16]), nil
}

// machineID returns an id of this machine that lasts until the next boot, or the host name if the system has no such
// id.
func machineID() string {
	if raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		return strings.TrimSpace(string(raw))
	}
	if host, err := os.Hostname(); err == nil {
		return host
	}
	return ""
}

// ignoreEOF returns nil for io.EOF, which reading an empty folder returns, and otherwise err.
func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
