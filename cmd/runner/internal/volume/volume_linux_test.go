package volume

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestVolume_UnmarshalText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Volume{
		"spool-a-work=/v/0": {"spool-a-work", "/v/0"},
		"a=/v/x=y":          {"a", "/v/x=y"},
		"":                  {},
		"a":                 {},
		"=/v":               {},
		"a=v":               {},
		"../a=/v":           {},
		"a/b=/v":            {},
		".lock=/v":          {},
		"..=/v":             {},
	} {
		var got Volume
		err := got.UnmarshalText([]byte(text))
		if got != want || (err == nil) != (want != Volume{}) {
			t.Errorf("%q is %+v, %v", text, got, err)
		}
	}
}

// The file system holds the limit in addition to its metadata, and not much more.
func TestLimits_Size(t *testing.T) {
	t.Parallel()
	for _, l := range []Limits{{1 << 20, 1024}, {16 << 20, 1024}, {128 << 20, 32_768}, {10 << 30, 1_000_000}, {1 << 40, 1_000_000}} {
		if got := l.totalSize(); got%blockSize != 0 || got < l.Bytes+l.Files*inodeSize || got > l.Bytes+l.Bytes/16+l.Files*inodeSize+64<<20 {
			t.Errorf("%+v: %d bytes", l, got)
		}
	}
	for _, l := range []Limits{{}, {1 << 20, 0}, {1 << 19, 10}, {-1, -1}} {
		if err := MakeFileSystems(l, nil); err == nil {
			t.Errorf("%+v is taken", l)
		}
	}
}

// CheckLimits returns nil only if both limits are enforced.
func TestExceed(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("file systems are mounted as root")
	}
	const bytes, files = 1 << 20, 100
	for options, says := range map[string]string{
		fmt.Sprintf("size=%d,nr_inodes=%d", bytes, files): "",
		fmt.Sprintf("size=%d,nr_inodes=0", bytes):         "files could be made",
		fmt.Sprintf("size=%d,nr_inodes=%d", 8*bytes, 10):  "could be written",
	} {
		dir := filepath.Join(t.TempDir(), "limited")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
		err := CheckLimits(dir, Limits{bytes, files})
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", options, err)
		}
	}
}
