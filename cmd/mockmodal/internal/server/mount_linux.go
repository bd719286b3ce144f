package server

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// bindMount mounts a folder of the container over another path of the container.
func (b *sandboxContainer) bindMount(folder, path string) error {
	return b.inMountNamespace(func() error {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		return unix.Mount(folder, path, "", unix.MS_BIND, "")
	})
}

// unmount removes the topmost mount over a path in the container.
func (b *sandboxContainer) unmount(path string) error {
	return b.inMountNamespace(func() error { return unix.Unmount(path, unix.MNT_DETACH) })
}

// inMountNamespace calls f on a new thread in the mount namespace of the container, so that f sees the container's
// files.
func (b *sandboxContainer) inMountNamespace(f func() error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", b.pid))
	if err != nil {
		return err
	}
	defer namespace.Close() //nolint:errcheck // read only
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: nothing else may run on this thread
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- err
			return
		}
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
