package natsserver

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
)

// diskLimit returns the limit in bytes for the streams in a folder: their present size plus three quarters of the free
// disk. The limit of a restarted server therefore does not depend on how much it has stored.
func diskLimit(dir string) (int64, error) {
	free, err := freeSpace(dir)
	if err != nil {
		return 0, err
	}
	var used int64
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			used += info.Size()
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("nats: read the size of %s: %w", dir, err)
	}
	return max(MinStoreSize, used+free/4*3), nil
}

// freeSpace returns the free space of a folder's disk in bytes.
func freeSpace(dir string) (int64, error) {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(dir, &disk); err != nil {
		return 0, fmt.Errorf("nats: read the free space of %s: %w", dir, err)
	}
	return int64(disk.Bavail) * int64(disk.Bsize), nil //nolint:gosec,unconvert // bytes of a disk; the types differ between systems
}
