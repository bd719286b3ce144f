package snapshot_test

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// sharedBox returns a box whose workspace is a person's folder.
func sharedBox(t *testing.T) *box {
	t.Helper()
	b := newBox(t)
	b.env = []string{"SPOOL_RUNNER_SHARED=true"}
	return b
}

// Ignored files are left out; links are kept as links; unreadable entries, entries that are not files, and files that
// are too large are skipped and named.
func TestSharedFolder_SkipsWhatASnapshotCannotHold(t *testing.T) {
	t.Parallel()
	b := sharedBox(t)
	for path, content := range map[string]string{
		"fine": "1", ".gitignore": "*.log\n", "a.log": "2", ".git/HEAD": "3", "closed": "4", "locked/in": "5",
	} {
		put(t, b.workspace, path, content)
	}
	in := func(name string) string { return filepath.Join(b.workspace, name) }
	l, err := net.Listen("unix", in("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the test's own
	want := map[string]wire.SkipReason{
		"workspace/pipe": wire.SkipSpecial, "workspace/socket": wire.SkipSpecial, "workspace/sparse": wire.SkipOverLimit,
		"workspace/closed": wire.SkipUnreadable, "workspace/locked": wire.SkipUnreadable,
	}
	if os.Getuid() == 0 {
		want["workspace/device"] = wire.SkipSpecial
		if err := syscall.Mknod(in("device"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		syscall.Mkfifo(in("pipe"), 0o644), os.Symlink("/etc/passwd", in("out")), os.WriteFile(in("sparse"), nil, 0o600), os.Truncate(in("sparse"), 5<<30),
		os.Chmod(in("closed"), 0), os.Chmod(in("locked"), 0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b.asOther(t)
	store := &workspacetest.MemoryStore{}
	r := take(t, b, store, "")
	got := map[string]wire.SkipReason{}
	for _, s := range r.Skips {
		got[s.Path] = s.Reason
	}
	if !maps.Equal(got, want) || int(r.Skipped) != len(want) {
		t.Errorf("%d are skipped: %v, want %v", r.Skipped, got, want)
	}
	to := newBox(t)
	restore(t, to, store, r.ID)
	back := tree(t, to.workspace)
	if len(back) != 4 || back["fine"].content != "1" || back["out"].content != "/etc/passwd" {
		t.Errorf("the snapshot holds %v", back)
	}
}

// A snapshot of a larger folder holds as many files as the limit allows, and names the first one that it does not hold.
func TestSharedFolder_TakesFilesUpToTheLimit(t *testing.T) {
	t.Parallel()
	const limit = 20_000
	b := sharedBox(t)
	for i := range limit + 10 {
		put(t, b.workspace, fmt.Sprintf("%03d/%05d", i/100, i), "")
	}
	r := take(t, b, &workspacetest.MemoryStore{}, "")
	if r.Files != limit || r.Skipped != 1 || r.Skips[0].Reason != wire.SkipOverLimit || r.Skips[0].Path != fmt.Sprintf("workspace/%03d/%05d", limit/100, limit) {
		t.Errorf("result %+v", r)
	}
}
