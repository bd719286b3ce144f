// Package workspaces joins sandboxes and the object store of workspaces for package contents.
package workspaces

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/executor/internal/contents"
)

// Workspaces implements contents.Store over the bucket of the same name.
type Workspaces struct {
	store  workspace.Store
	room   *storage.Watch
	logger *slog.Logger
}

var _ contents.Store = (*Workspaces)(nil)

// New makes one that Open makes work.
func New(log *slog.Logger) *Workspaces { return &Workspaces{logger: log} }

// CheckRoom makes snapshots fail while only the reserve of the store of NATS is left. It comes before Open.
func (w *Workspaces) CheckRoom(room *storage.Watch) { w.room = room }

// Open finds the bucket. It comes before all else.
func (w *Workspaces) Open(ctx context.Context, js jetstream.JetStream) error {
	store, err := natsstore.Open(ctx, js, topology.BucketWorkspaces)
	if err != nil {
		return err
	}
	store.CheckRoom(func(ctx context.Context) error { return w.room.Check(ctx, 0) })
	w.store = store
	return nil
}

// Snapshot stores what changed since the previous one.
func (w *Workspaces) Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string) (contents.Snapshot, error) {
	r, err := workspace.Snapshot(ctx, box, w.store, workspace.Options{Tenant: ref.Tenant, Session: ref.Session, Previous: previous})
	if err != nil {
		return contents.Snapshot{}, err
	}
	if r.Lost != nil {
		w.logger.Warn("the snapshot before could not be used: everything was stored again", "session", ref.Session, "snapshot", previous, "error", r.Lost)
	}
	for _, s := range r.Skips {
		w.logger.Warn("not in the snapshot", "session", ref.Session, "path", s.Path, "reason", s.Reason)
	}
	return contents.Snapshot{ID: r.ID, Files: r.Files, Bytes: r.Bytes, NewBytes: r.NewBytes, Stored: r.Stored, Skipped: r.Skipped}, nil
}

// Restore fills a sandbox from a snapshot, or from some of its trees.
func (w *Workspaces) Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.Tree) (uint32, error) {
	r, err := workspace.Restore(ctx, box, w.store, ref.Tenant, ref.Session, id, trees...)
	return r.Files, err
}

// Put writes a file, or unpacks an archive.
func (w *Workspaces) Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence contents.Fence) error {
	content, err := w.store.Get(ctx, f.Object)
	if errors.Is(err, workspace.ErrNotFound) {
		return fmt.Errorf("%w: its content is no longer in the object store", contents.ErrRefused)
	}
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // read to its end, or given up
	checked := &checked{r: content, sum: sha256.New(), want: f.SHA256, fence: func() error { return fence(ctx) }, asked: time.Now()}
	if f.Archive {
		err = workspace.Unpack(ctx, box, f.Path, checked)
	} else {
		err = box.Files().Put(ctx, f.Path, checked)
	}
	var refused *workspace.RefusedError
	if errors.As(err, &refused) || errors.Is(err, sandbox.ErrOutside) || errors.Is(err, errCorrupt) {
		return fmt.Errorf("%w: %w", contents.ErrRefused, err)
	}
	return err
}

// Provide gives a sandbox the transcript that its agent is to begin with.
func (w *Workspaces) Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error {
	content, err := w.store.Get(ctx, t.Object)
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // read to its end, or given up
	return workspace.Provide(ctx, box, t.SHA256, content)
}

// errCorrupt is content that is not what was put.
var errCorrupt = errors.New("its content is not what was uploaded")

// fenceEvery is for how long an answer of the fence counts while content is read: an archive's files are put in place one by one.
const fenceEvery = time.Second

// checked fails at the end of content whose hash is another, or whose fence fails, so that it is never put in place.
type checked struct {
	r     io.Reader
	sum   hash.Hash
	want  string
	fence func() error
	asked time.Time // when the fence was asked last
}

func (c *checked) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.sum.Write(p[:n]) //nolint:errcheck // a hash does not fail
	end := errors.Is(err, io.EOF)
	if end && hex.EncodeToString(c.sum.Sum(nil)) != c.want {
		return n, errCorrupt
	}
	if end || time.Since(c.asked) >= fenceEvery {
		if ferr := c.fence(); ferr != nil {
			return 0, ferr
		}
		c.asked = time.Now()
	}
	return n, err
}
