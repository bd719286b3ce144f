package volume

import (
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// newVolume returns a volume with a folder for the test. Its loop device is removed with the test.
func newVolume(t *testing.T) Volume {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loop devices are root's")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skipf("this machine has no loop devices: %v", err)
	}
	for _, name := range []string{"mkfs.ext4", "debugfs", "e2fsck"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("e2fsprogs is not installed: %v", err)
		}
	}
	v := Volume{Name: "spool-test-" + strings.ToLower(rand.Text()), Dir: t.TempDir()}
	t.Cleanup(func() {
		if err := os.Remove(v.imagePath()); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		if _, err := DetachUnusedDevices(); err != nil {
			t.Error(err)
		}
		if d := deviceOf(t, v); d != nil {
			t.Errorf("%s stays attached", d.devicePath())
		}
		if _, err := os.Lstat(filepath.Join(NodesFolder, v.Name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the node stays: %v", err)
		}
	})
	return v
}

// deviceOf returns the loop device with the volume's name.
func deviceOf(t *testing.T, v Volume) *loopDevice {
	t.Helper()
	list, err := attachedDevices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		if d.name == loopNamePrefix+v.Name {
			return &d
		}
	}
	return nil
}

// mounted runs f in the volume's file system.
func mounted(t *testing.T, v Volume, f func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(filepath.Join(NodesFolder, v.Name), dir, "ext4", unix.MS_NOSUID|unix.MS_NODEV, "discard"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	f(dir)
}

// MakeFileSystems finds an existing volume, and creates an incomplete one again.
func TestMake_FindsWhatIsThere(t *testing.T) {
	v := newVolume(t)
	if err := os.WriteFile(v.imagePath()+".part", []byte("of somebody who was killed"), 0o600); err != nil {
		t.Fatal(err)
	}
	limits := Limits{16 << 20, 1024}
	if err := MakeFileSystems(limits, []Volume{v}); err != nil {
		t.Fatal(err)
	}
	mounted(t, v, func(dir string) {
		if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
			t.Errorf("a new volume holds %v, %v", list, err)
		}
		if err := os.WriteFile(filepath.Join(dir, "mark"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	})
	before := deviceOf(t, v)
	if err := errors.Join(MakeFileSystems(limits, []Volume{v}), AttachFileSystems([]Volume{v})); err != nil {
		t.Fatal(err)
	}
	if after := deviceOf(t, v); before == nil || after == nil || *before != *after {
		t.Errorf("the device was %+v and is %+v", before, after)
	}
	mounted(t, v, func(dir string) {
		if _, err := os.Stat(filepath.Join(dir, "mark")); err != nil {
			t.Error(err)
		}
		if err := CheckLimits(dir, limits); err != nil {
			t.Error(err)
		}
	})
}

// A file system whose machine was switched off is repaired before it is attached, whether ext4 keeps a journal or not.
func TestAttach_AfterTheMachineWasSwitchedOff(t *testing.T) {
	for name, limits := range map[string]Limits{"without a journal": {16 << 20, 1024}, "with a journal": {256 << 20, 1024}} {
		t.Run(name, func(t *testing.T) {
			v := newVolume(t)
			if err := MakeFileSystems(limits, []Volume{v}); err != nil {
				t.Fatal(err)
			}
			mounted(t, v, func(dir string) {
				mark := filepath.Join(dir, "mark")
				f, err := os.Create(mark)
				if err != nil {
					t.Fatal(err)
				}
				_, err = f.WriteString("kept")
				if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
					t.Fatal(err)
				}
				// The present content of the disk is what a power failure would leave.
				if out, err := exec.Command("cp", "--sparse=always", v.imagePath(), v.imagePath()+".cut").CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			})
			if err := os.Rename(v.imagePath()+".cut", v.imagePath()); err != nil {
				t.Fatal(err)
			}
			if _, err := DetachUnusedDevices(); err != nil || deviceOf(t, v) != nil {
				t.Fatalf("the device of a file that was replaced: %+v, %v", deviceOf(t, v), err)
			}
			if err := AttachFileSystems([]Volume{v}); err != nil {
				t.Fatal(err)
			}
			mounted(t, v, func(dir string) {
				if raw, err := os.ReadFile(filepath.Join(dir, "mark")); string(raw) != "kept" {
					t.Errorf("the mark is %q, %v", raw, err)
				}
				if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
					t.Errorf("the volume holds %v, %v", list, err)
				}
			})
			if out, err := exec.Command("e2fsck", "-f", "-n", v.imagePath()).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// The sweep leaves existing volumes, and loop devices of other programs.
func TestSweep_TouchesNothingElse(t *testing.T) {
	v := newVolume(t)
	if err := MakeFileSystems(Limits{16 << 20, 1024}, []Volume{v}); err != nil {
		t.Fatal(err)
	}
	foreign, err := os.OpenFile(filepath.Join(t.TempDir(), "foreign"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(foreign.Truncate(1<<20), os.Remove(foreign.Name())); err != nil {
		t.Fatal(err)
	}
	number, err := attachFreeDevice("not-ours", foreign)
	if err := errors.Join(err, foreign.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := (loopDevice{number: number}).detachFile(); err != nil {
			t.Error(err)
		}
	})
	if _, err := DetachUnusedDevices(); err != nil {
		t.Fatal(err)
	}
	if deviceOf(t, v) == nil {
		t.Error("a volume that is there was detached")
	}
	if _, err := os.Lstat(filepath.Join(NodesFolder, v.Name)); err != nil {
		t.Error(err)
	}
	d := loopDevice{number: number}
	if err := d.readStatus(); err != nil || d.name != "not-ours" {
		t.Errorf("a device of others is %+v, %v", d, err)
	}
}
