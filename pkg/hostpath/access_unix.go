//go:build unix

package hostpath

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// fileID is the device and the inode.
func fileID(info fs.FileInfo) (string, error) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", fmt.Errorf("no inode is known: %w", fs.ErrInvalid)
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

// accessAll asks for reading, writing and entering: R_OK, W_OK and X_OK of access(2).
const accessAll = 4 | 2 | 1

// accessible reports an error unless this process may read, write and enter a folder.
func accessible(dir string) error {
	if err := syscall.Access(dir, accessAll); err != nil {
		return &os.PathError{Op: "access", Path: dir, Err: err}
	}
	return nil
}
