package watch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inotifyMask is the set of inotify events that are reported for a watched folder. Changes of permissions and times
// only matter to snapshots.
const inotifyMask = unix.IN_ATTRIB | unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW | unix.IN_EXCL_UNLINK

// inotifyReader reads changes of watched folders from the kernel's inotify. It implements changeSource.
type inotifyReader struct {
	fd   int
	file *os.File // the same, for reads that Close interrupts
}

// newInotifyReader returns an inotifyReader that watches no folder yet.
func newInotifyReader() (*inotifyReader, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	return &inotifyReader{fd: fd, file: os.NewFile(uintptr(fd), "inotify")}, nil //nolint:gosec // a descriptor
}

func (n *inotifyReader) close() error { return n.file.Close() }

// addWatch implements changeSource.
func (n *inotifyReader) addWatch(dir string) (int, error) {
	wd, err := unix.InotifyAddWatch(n.fd, dir, inotifyMask)
	if err != nil {
		return 0, fmt.Errorf("watch %s: %w", dir, err)
	}
	return wd, nil
}

// removeWatch implements changeSource.
func (n *inotifyReader) removeWatch(wd int) {
	_, _ = unix.InotifyRmWatch(n.fd, uint32(wd)) //nolint:gosec // from the kernel
}

// addMark adds a watch and removes it at once. The kernel reports the end of that watch after all earlier changes;
// addMark returns the number of the watch.
func (n *inotifyReader) addMark() (int, error) {
	wd, err := unix.InotifyAddWatch(n.fd, "/", unix.IN_DELETE_SELF)
	if err != nil {
		return 0, fmt.Errorf("inotify: %w", err)
	}
	n.removeWatch(wd)
	return wd, nil
}

// isWatchLimitError reports whether an error means that the kernel allows no further watches.
func isWatchLimitError(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOSYS)
}

// readChanges implements changeSource.
func (n *inotifyReader) readChanges(buf []byte) ([]kernelChange, error) {
	k, err := n.file.Read(buf)
	if err != nil {
		return nil, err
	}
	var out []kernelChange
	for buf = buf[:k]; len(buf) >= unix.SizeofInotifyEvent; {
		var e unix.InotifyEvent
		e.Wd = int32(binary.NativeEndian.Uint32(buf[unsafe.Offsetof(e.Wd):])) //nolint:gosec // same bits
		e.Mask = binary.NativeEndian.Uint32(buf[unsafe.Offsetof(e.Mask):])
		e.Len = binary.NativeEndian.Uint32(buf[unsafe.Offsetof(e.Len):])
		end := unix.SizeofInotifyEvent + int(e.Len)
		if end > len(buf) {
			break
		}
		name, _, _ := bytes.Cut(buf[unix.SizeofInotifyEvent:end], []byte{0})
		buf = buf[end:]
		c := kernelChange{wd: int(e.Wd), name: string(name), folder: e.Mask&unix.IN_ISDIR != 0}
		switch {
		case e.Mask&unix.IN_Q_OVERFLOW != 0:
			c.kind = changeOverflow
		case e.Mask&unix.IN_IGNORED != 0:
			c.kind = changeWatchEnded
		case e.Mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
			c.kind = changeAppeared
		case e.Mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0:
			c.kind = changeVanished
		case e.Mask&unix.IN_MODIFY != 0:
			c.kind = changeWritten
		case e.Mask&unix.IN_CLOSE_WRITE != 0:
			c.kind = changeClosed
		case e.Mask&unix.IN_ATTRIB != 0:
			c.kind = changeAttributes
		default:
			continue
		}
		out = append(out, c)
	}
	return out, nil
}
