package natstest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// SmallDisk is a file system of its own, which a test can fill.
type SmallDisk struct {
	Dir string
	t   testing.TB
}

// MountSmallDisk mounts a file system of 256 MiB until the test ends. It skips the test if the process is not root.
func MountSmallDisk(t testing.TB) *SmallDisk {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	d := &SmallDisk{Dir: t.TempDir(), t: t}
	if err := syscall.Mount("tmpfs", d.Dir, "tmpfs", 0, "size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(d.Dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *SmallDisk) ballast() string { return filepath.Join(d.Dir, "ballast") }

// Fill writes to the disk until it has no space.
func (d *SmallDisk) Fill() {
	d.t.Helper()
	f, err := os.Create(d.ballast())
	if err != nil {
		d.t.Fatal(err)
	}
	for chunk := bytes.Repeat([]byte("x"), 1<<20); ; {
		n, err := f.Write(chunk)
		if errors.Is(err, syscall.ENOSPC) {
			if chunk = chunk[:len(chunk)/2]; n == 0 && len(chunk) == 0 {
				break
			}
			continue
		}
		if err != nil {
			d.t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		d.t.Fatal(err)
	}
}

// Free removes what Fill has written.
func (d *SmallDisk) Free() {
	d.t.Helper()
	if err := os.Remove(d.ballast()); err != nil {
		d.t.Fatal(err)
	}
}
