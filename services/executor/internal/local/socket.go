package local

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// maxSocketPathBytes is the maximum length of the path of a Unix socket in bytes.
const maxSocketPathBytes = 107

// socketPath returns the path of the socket of a sandbox's runner: in the sandbox's folder or, if that path is too long, in a
// folder of this user with a short path.
func (p *Provider) socketPath(id string) (string, error) {
	if path := filepath.Join(p.sandboxDir(id), "runner.sock"); len(path) <= maxSocketPathBytes {
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
		if len(path) > maxSocketPathBytes {
			continue
		}
		return path, makePrivateFolder(dir)
	}
	return "", fmt.Errorf("no folder for the runner's socket is short enough: set XDG_RUNTIME_DIR to one of at most %d bytes", maxSocketPathBytes-len(id)-32)
}

// makePrivateFolder creates a folder that only this user can access. It returns an error if the folder exists with other rights.
func makePrivateFolder(dir string) error {
	if err := os.Mkdir(dir, 0o700); err == nil {
		return nil
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || info.Mode().Perm() != 0o700 || int(stat.Uid) != os.Getuid() {
		return fmt.Errorf("folder %s for sockets is accessible to other users: remove it", dir)
	}
	return nil
}
