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

// Identity returns a value that identifies a folder on this machine for this user. Two processes that compute the
// same value see the same folder with the same rights. A process on another machine, in another container or of
// another user computes a different value.
func Identity(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", reasonError(path, err)
	}
	id, err := fileID(info)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", machine(), id, os.Geteuid()))
	return hex.EncodeToString(sum[:16]), nil
}

// machine returns an id of this machine that lasts until the next boot, or the host name if the system has no such
// id.
func machine() string {
	if raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		return strings.TrimSpace(string(raw))
	}
	if host, err := os.Hostname(); err == nil {
		return host
	}
	return ""
}

// ignoreEnd returns nil for io.EOF, which an empty folder yields, and otherwise err.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
