package snapshot_test

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// conversation is a snapshot of which the test is the host.
type conversation struct {
	in   *io.PipeWriter
	from *wire.Reader
	to   *wire.Writer
	end  chan error
}

func converse(t *testing.T, b *box) *conversation {
	t.Helper()
	hostIn, runnerOut := io.Pipe()
	runnerIn, hostOut := io.Pipe()
	c := &conversation{hostOut, wire.NewReader(hostIn), wire.NewWriter(hostOut), make(chan error, 1)}
	take := snapshot.Snapshotter{Roots: snapshot.RootPaths{Workspace: b.workspace, State: b.state}, Log: slog.New(slog.DiscardHandler)}
	go func() { c.end <- errors.Join(take.Run(t.Context(), runnerIn, runnerOut), runnerOut.Close()) }()
	return c
}

// walked lets the runner look at everything, and returns the snapshot that its changes are based on.
func (c *conversation) walked(t *testing.T, base string) string {
	t.Helper()
	var found wire.FoundTree
	err := errors.Join(c.to.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion, Edits: true, Base: base}), c.to.Flush())
	if err == nil {
		_, err = c.from.ReadHello()
	}
	if err == nil {
		err = c.from.Expect(wire.FrameFoundTree, &found)
	}
	if err == nil {
		err = errors.Join(c.to.WriteFrame(wire.FrameGo, nil), c.to.Flush())
	}
	for kind := wire.FrameType(0); err == nil && kind != wire.FrameEnd; {
		kind, _, err = c.from.Next()
	}
	if err != nil {
		t.Fatal(err)
	}
	return found.Base
}

func (c *conversation) named(t *testing.T, id string) {
	t.Helper()
	if err := errors.Join(c.to.WriteJSON(wire.FrameStoredSnapshot, wire.StoredSnapshot{ID: id}), c.to.Flush(), c.in.Close(), <-c.end); err != nil {
		t.Error(err)
	}
}

// Two snapshots at a time, for example of a host that was cut off and of the next one, never name each other's index.
func TestIndex_IsNamedByItsOwnSnapshot(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*testing.T, *box){
		"after a change": func(t *testing.T, b *box) { put(t, b.workspace, "later", "1") },
		"unchanged":      func(*testing.T, *box) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			put(t, b.workspace, "f", "1")
			old(t, b.workspace)
			first := converse(t, b)
			first.walked(t, "")
			saved := savedAfter(t, b, 0)
			change(t, b)
			second := converse(t, b)
			second.walked(t, "")
			savedAfter(t, b, saved)
			first.named(t, "m-first")
			third := converse(t, b)
			if base := third.walked(t, "m-first"); base != "" {
				t.Errorf("changes since %q, whose index another snapshot has replaced", base)
			}
			third.named(t, "m-third")
			second.named(t, "m-second")
			fourth := converse(t, b)
			if base := fourth.walked(t, "m-third"); base != "m-third" {
				t.Errorf("changes since %q, want m-third", base)
			}
			fourth.named(t, "m-fourth")
		})
	}
}

// savedAfter waits for an index that is another file than the one with an inode, and returns its own.
func savedAfter(t *testing.T, b *box, inode uint64) uint64 {
	t.Helper()
	for range 10_000 {
		info, err := os.Stat(filepath.Join(b.state, ".spool-index"))
		if err == nil && info.Sys().(*syscall.Stat_t).Ino != inode {
			return info.Sys().(*syscall.Stat_t).Ino
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("no index was saved")
	return 0
}
