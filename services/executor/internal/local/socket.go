package local

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// maxSocket is what a Unix socket's path may have in bytes.
const maxSocket = 107

// socket gives the path of a sandbox's socket: in its folder, or in a short one
// of this user where that is too deep.
func (p *Provider) socket(id string) (string, error) {
	if path := filepath.Join(p.folder(id), "runner.sock"); len(path) <= maxSocket {
		return path, nil
	}
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	sum := sha256.Sum256([]byte(p.cfg.Dir))
	name := hex.EncodeToString(sum[:4])
	for _, base := range []string{base, "/tmp"} {
		dir := filepath.Join(base, fmt.Sprintf("spool-%d-%s", os.Getuid(), name))
		path := filepath.Join(dir, id+".sock")
		if len(path) > maxSocket {
			continue
		}
		return path, private(dir)
	}
	return "", fmt.Errorf("no folder for the runner's socket is short enough: set XDG_RUNTIME_DIR to one of at most %d bytes", maxSocket-len(id)-32)
}

// private makes a folder that is this user's alone, or makes sure that it is.
func private(dir string) error {
	if err := os.Mkdir(dir, 0o700); err == nil {
		return nil
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || info.Mode().Perm() != 0o700 || int(stat.Uid) != os.Getuid() {
		return fmt.Errorf("folder %s for sockets is not this user's alone: remove it", dir)
	}
	return nil
}
