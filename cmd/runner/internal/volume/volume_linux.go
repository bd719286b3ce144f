package volume

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"
)

const (
	// sysBlockFolder is the folder in sysfs that lists the block devices.
	sysBlockFolder = "/sys/block"
	// loopMajorNumber is the major device number of Linux's loop driver.
	loopMajorNumber = 7
	// maxAttachAttempts is the maximum number of times that a free loop device is requested, because other programs may take
	// it first.
	maxAttachAttempts = 100
)

// isNoSpace reports whether err means that a file system is full or a quota is reached.
func isNoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// MakeFileSystems creates the file systems of those volumes that have none, and attaches the file systems of all volumes to loop devices.
func MakeFileSystems(l Limits, volumes []Volume) error {
	if err := l.validate(); err != nil {
		return err
	}
	return withVolumeLock(func() error {
		for _, v := range volumes {
			if err := v.makeFileSystem(l); err != nil {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			if err := v.attachDevice(); err != nil {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
		}
		return nil
	})
}

// AttachFileSystems attaches the existing file systems of volumes to loop devices, which is necessary after a reboot.
func AttachFileSystems(volumes []Volume) error {
	return withVolumeLock(func() error {
		for _, v := range volumes {
			if err := v.attachDevice(); err != nil {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
		}
		return nil
	})
}

// DetachUnusedDevices detaches those of Spool's loop devices whose file was removed, and removes device nodes that name no device of Spool. It
// returns the number of detached devices.
func DetachUnusedDevices() (detached int, err error) {
	err = withVolumeLock(func() error {
		devices, err := attachedDevices()
		if err != nil {
			return err
		}
		ours := map[int]bool{}
		for _, d := range devices {
			if !strings.HasPrefix(d.name, loopNamePrefix) {
				continue
			}
			if !d.deleted {
				ours[d.number] = true
				continue
			}
			if err := d.detachFile(); err != nil {
				return err
			}
			detached++
		}
		return removeNodes(func(number int) bool { return !ours[number] })
	})
	return detached, err
}

// withVolumeLock calls f under a lock that all containers on the machine share.
func withVolumeLock(f func() error) error {
	if err := os.MkdirAll(NodesFolder, 0o700); err != nil {
		return err
	}
	lock := flock.New(filepath.Join(NodesFolder, ".lock"))
	for err := lock.Lock(); err != nil; err = lock.Lock() {
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", lock.Path(), err)
		}
	}
	return errors.Join(f(), lock.Unlock())
}

// imagePath returns the path of the file with the volume's file system.
func (v Volume) imagePath() string { return filepath.Join(v.Dir, imageFileName) }

// makeFileSystem creates the file system under another name first, so that a file with the final name is complete.
func (v Volume) makeFileSystem(l Limits) error {
	if _, err := os.Stat(v.imagePath()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	part := v.imagePath() + ".part"
	if err := os.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(part, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(l.totalSize()), f.Close()); err != nil {
		return err
	}
	if err := runProgram("mkfs.ext4", append(l.mkfsOptions(), part)...); err != nil {
		return err
	}
	// Users would see lost+found among their files, and cannot read it.
	if err := runProgram("debugfs", "-w", "-R", "rmdir lost+found", part); err != nil {
		return err
	}
	return os.Rename(part, v.imagePath())
}

// repairFileSystem repairs a file system that was mounted when its machine was switched off.
func (v Volume) repairFileSystem() error {
	if err := runProgram("e2fsck", "-y", v.imagePath()); err != nil {
		return err
	}
	// The check may have created lost+found again. If it holds files that lost their names, it stays for people to
	// examine.
	_ = runProgram("debugfs", "-w", "-R", "rmdir lost+found", v.imagePath()) // fails if it does not exist, which is the normal case
	return nil
}

// runProgram runs a program of the container's image. debugfs reports an error only by its output after the line with its version; e2fsck exits
// with 1 after a successful repair.
func runProgram(name string, args ...string) error {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err != nil {
			path, err = exec.LookPath(filepath.Join(dir, name))
		}
	}
	if err != nil {
		return fmt.Errorf("the image has no %s: install e2fsprogs in it", name)
	}
	cmd := exec.Command(path, args...)
	out, err := cmd.CombinedOutput()
	failed := err != nil
	switch said := bytes.TrimSpace(out); name {
	case "debugfs":
		_, said, _ = bytes.Cut(said, []byte("\n"))
		failed = failed || len(said) > 0
	case "e2fsck":
		failed = failed && cmd.ProcessState.ExitCode() != 1
	}
	if failed {
		return fmt.Errorf("%s: %w: %.500s", name, errorOrUnexpectedSuccess(err), bytes.TrimSpace(out))
	}
	return nil
}

// loopDevice is a loop device of the kernel, with the file that is attached to it.
type loopDevice struct {
	number  int
	name    string // set by the program that attached the file
	dev     uint64 // of the file
	inode   uint64
	deleted bool // the file has no name any more
}

// devicePath returns the path of the device in /dev.
func (d loopDevice) devicePath() string { return "/dev/loop" + strconv.Itoa(d.number) }

// attachedDevices returns the loop devices that have a file attached.
func attachedDevices() ([]loopDevice, error) {
	list, err := filepath.Glob(sysBlockFolder + "/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var out []loopDevice
	for _, path := range list {
		backing, err := os.ReadFile(path)
		if err != nil {
			continue // detached just now
		}
		number, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(filepath.Dir(path))), "loop"))
		if err != nil {
			continue // not the name of a loop device
		}
		d := loopDevice{number: number, deleted: strings.HasSuffix(strings.TrimSpace(string(backing)), " (deleted)")}
		if err := d.readStatus(); errors.Is(err, unix.ENXIO) {
			continue
		} else if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// open opens the loop device. If the engine runs in a container, the device node may be missing in its /dev; open then creates the node.
func (d loopDevice) open(flags int) (*os.File, error) {
	err := unix.Mknod(d.devicePath(), unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajorNumber, uint32(d.number)))) //nolint:gosec // a minor number
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make %s: %w", d.devicePath(), err)
	}
	return os.OpenFile(d.devicePath(), flags, 0)
}

// readStatus reads the name and the attached file of the device from the kernel.
func (d *loopDevice) readStatus() error {
	f, err := d.open(os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read from
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return fmt.Errorf("look at %s: %w", d.devicePath(), err)
	}
	d.dev, d.inode, d.name = info.Device, info.Inode, unix.ByteSliceToString(info.File_name[:])
	return nil
}

// detachFile detaches the file from the device: at once, or if the device is mounted, at its last close.
func (d loopDevice) detachFile() error {
	f, err := d.open(os.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // nothing is written
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", d.devicePath(), err)
	}
	return nil
}

// attachDevice makes sure that the volume's file is attached to a loop device, and that the volume's node names that device.
func (v Volume) attachDevice() error {
	f, err := os.OpenFile(v.imagePath(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // the device has its own
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	devices, err := attachedDevices()
	if err != nil {
		return err
	}
	for _, d := range devices {
		if d.inode == st.Ino && d.dev == st.Dev {
			return v.makeNode(d.number)
		}
	}
	if err := v.repairFileSystem(); err != nil {
		return err
	}
	number, err := attachFreeDevice(loopNamePrefix+v.Name, f)
	if err != nil {
		return err
	}
	return v.makeNode(number)
}

// attachFreeDevice attaches a file to a free loop device under the given name, and returns the number of the device.
func attachFreeDevice(name string, f *os.File) (int, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return 0, fmt.Errorf("the engine's machine has no loop devices: %w", err)
	}
	defer control.Close() //nolint:errcheck // nothing is written
	for range maxAttachAttempts {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return 0, fmt.Errorf("find a free loop device: %w", err)
		}
		d := loopDevice{number: number}
		if err := d.attachFile(name, f); err == nil || !errors.Is(err, unix.EBUSY) {
			return number, err
		}
	}
	return 0, errors.New("find a free loop device: other programs took each one first")
}

// attachFile attaches the file to the device under the given name.
func (d loopDevice) attachFile(name string, file *os.File) error {
	f, err := d.open(os.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close()                                  //nolint:errcheck // nothing is written
	config := unix.LoopConfig{Fd: uint32(file.Fd())} //nolint:gosec // a descriptor
	copy(config.Info.File_name[:len(config.Info.File_name)-1], name)
	if err := unix.IoctlLoopConfigure(int(f.Fd()), &config); err != nil {
		return fmt.Errorf("attach to %s: %w", d.devicePath(), err)
	}
	return nil
}

// makeNode creates the volume's device node for the loop device with the given number. It removes other nodes of that device, which belong to
// volumes whose device was detached.
func (v Volume) makeNode(number int) error {
	if err := removeNodes(func(n int) bool { return n == number }); err != nil {
		return err
	}
	path := filepath.Join(NodesFolder, v.Name)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajorNumber, uint32(number)))) //nolint:gosec // a minor number
}

// removeNodes removes the device nodes for whose number doomed returns true.
func removeNodes(doomed func(number int) bool) error {
	list, err := os.ReadDir(NodesFolder)
	if err != nil {
		return err
	}
	for _, e := range list {
		path := filepath.Join(NodesFolder, e.Name())
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFBLK || !doomed(int(unix.Minor(st.Rdev))) {
			continue
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return nil
}
