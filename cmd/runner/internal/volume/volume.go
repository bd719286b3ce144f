// Package volume makes file systems of a fixed size in files, and attaches the files to loop devices, so that the
// engine can mount them as volumes of sandboxes. Its functions run as root on the engine's machine, in a container that
// sees /dev and the folder of the volume and that has one capability, CAP_MKNOD.
//
// The file lies in the folder of its volume: the engine removes both together. The loop device then has a file without
// a name, by which DetachUnusedDevices recognises it.
package volume

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	// NodesFolder is the folder with the device nodes of volumes, one for each volume. It is in /dev, which is empty
	// after a reboot, so that no node names a device of another volume then.
	NodesFolder = "/dev/spool"
	// imageFileName is the name of the file in a volume's folder that holds the volume's file system.
	imageFileName = "disk.img"
	// loopNamePrefix is the prefix of the names of the loop devices that Spool attaches.
	loopNamePrefix = "spool:"

	blockSize = 4096
	inodeSize = 256
	// journalBytes is the size in bytes of the journal of a file system that is not small.
	journalBytes = 16 << 20
	// minSpareBytes and spareLimitDivisor determine the space of a file system beyond its limit: minSpareBytes and 1/spareLimitDivisor of
	// the limit. The space holds metadata, and lets the sandbox's disk watch, which counts file sizes only, see that
	// the limit is reached.
	minSpareBytes     = 8 << 20
	spareLimitDivisor = 32
)

// Volume names a volume of the Docker engine, and its folder on the engine's machine.
type Volume struct{ Name, Dir string }

// UnmarshalText parses a volume in the form name=folder.
func (v *Volume) UnmarshalText(raw []byte) error {
	name, dir, ok := strings.Cut(string(raw), "=")
	if !ok || name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") || !filepath.IsAbs(dir) {
		return fmt.Errorf("volume %q: want NAME=/folder", raw)
	}
	v.Name, v.Dir = name, dir
	return nil
}

// Limits are the limits of a volume's file system.
type Limits struct {
	Bytes int64 // size of all files; the file system is a little larger
	Files int64 // files and folders
}

// validate returns an error if a limit is out of range.
func (l Limits) validate() error {
	if l.Bytes < 1<<20 || l.Files < 1 {
		return fmt.Errorf("limits: %d bytes and %d files, want 1 MiB and 1 file at least", l.Bytes, l.Files)
	}
	return nil
}

// totalSize returns the size in bytes of a file system with these limits.
func (l Limits) totalSize() int64 {
	size := l.Bytes + l.Bytes/spareLimitDivisor + l.Files*inodeSize + minSpareBytes
	if l.hasJournal() {
		size += journalBytes
	}
	return (size + blockSize - 1) / blockSize * blockSize
}

// hasJournal reports whether a file system with these limits has a journal: a small one has no space for it.
func (l Limits) hasJournal() bool { return l.Bytes >= 8*journalBytes }

// mkfsOptions returns options of mkfs.ext4. With them nothing is reserved for root, and unused blocks take no space.
func (l Limits) mkfsOptions() []string {
	journal := []string{"-O", "^has_journal"}
	if l.hasJournal() {
		journal = []string{"-J", "size=" + strconv.Itoa(journalBytes>>20)}
	}
	return append([]string{
		"-q", "-F", "-b", strconv.Itoa(blockSize), "-I", strconv.Itoa(inodeSize), "-N", strconv.FormatInt(l.Files, 10),
		"-m", "0", "-e", "remount-ro", "-E", "lazy_itable_init=1,lazy_journal_init=1",
	}, journal...)
}

// CheckLimits tries to write three times the limits into the folder dir. It returns an error if that succeeds, because
// then nothing enforces the limits. l.Files may be 0 for no limit.
func CheckLimits(dir string, l Limits) error {
	path := filepath.Join(dir, "exceed")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, zeroReader{}, 3*l.Bytes)
	if err == nil {
		err = f.Sync()
	}
	if cerr := errors.Join(f.Close(), os.Remove(path)); cerr != nil && !isNoSpace(cerr) {
		return cerr
	}
	if !isNoSpace(err) {
		return fmt.Errorf("%d bytes could be written, the limit is %d: %w", 3*l.Bytes, l.Bytes, errorOrUnexpectedSuccess(err))
	}
	for n := range 3 * l.Files {
		f, err := os.OpenFile(path+strconv.FormatInt(n, 10), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
		if isNoSpace(err) {
			return nil
		}
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			return err
		}
	}
	if l.Files > 0 {
		return fmt.Errorf("%d files could be made, the limit is %d", 3*l.Files, l.Files)
	}
	return nil
}

// errUnexpectedSuccess is reported where an operation had to fail, or a program reported a failure only by its output.
var errUnexpectedSuccess = errors.New("no error was returned")

// errorOrUnexpectedSuccess returns err, or errUnexpectedSuccess if err is nil.
func errorOrUnexpectedSuccess(err error) error {
	if err == nil {
		return errUnexpectedSuccess
	}
	return err
}

// zeroReader is an io.Reader that returns zero bytes and never ends.
type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
