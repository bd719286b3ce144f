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

// Identity names a folder on this machine for this user: two processes that
// compute the same value see the same folder with the same rights. A process on
// another machine, in another container or of another user computes another one.
func Identity(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", reason(path, err)
	}
	id, err := fileID(info)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", machine(), id, os.Geteuid()))
	return hex.EncodeToString(sum[:16]), nil
}

// machine names this machine until it is started again; where the system has no such name, it is the host's name.
func machine() string {
	if raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		return strings.TrimSpace(string(raw))
	}
	if host, err := os.Hostname(); err == nil {
		return host
	}
	return ""
}

// ignoreEnd is nil for the end of an empty folder.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
