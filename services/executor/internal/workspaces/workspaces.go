// Package workspaces moves workspaces between sandboxes and the object store for package contents.
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

// Workspaces implements contents.Store over the object store's bucket of workspaces.
type Workspaces struct {
	store   workspace.Store
	room    *storage.Watch
	version int
	logger  *slog.Logger
}

var _ contents.Store = (*Workspaces)(nil)

// New returns a Workspaces that writes snapshots of a version, see workspace.Options. The caller must call Open before it moves
// workspaces.
func New(version int, log *slog.Logger) *Workspaces {
	return &Workspaces{version: version, logger: log}
}

// CheckRoom makes snapshots fail while the store of NATS has only its reserve left. It must be called before Open.
func (w *Workspaces) CheckRoom(room *storage.Watch) { w.room = room }

// Open opens the object bucket with the snapshots and files of workspaces.
func (w *Workspaces) Open(ctx context.Context, js jetstream.JetStream) error {
	store, err := natsstore.Open(ctx, js, topology.BucketWorkspaces)
	if err != nil {
		return err
	}
	store.SetRoomCheck(func(ctx context.Context) error { return w.room.Check(ctx, 0) })
	w.store = store
	return nil
}

// Snapshot stores what has changed since the previous snapshot.
func (w *Workspaces) Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string, full bool) (contents.Snapshot, error) {
	r, err := workspace.Snapshot(ctx, box, w.store, workspace.Options{Tenant: ref.Tenant, Session: ref.Session, Previous: previous, Full: full, Version: w.version})
	if err != nil {
		return contents.Snapshot{}, err
	}
	if r.Lost != nil {
		w.logger.Warn("the previous snapshot could not be used: everything was stored again", "session", ref.Session, "snapshot", previous, "error", r.Lost)
	}
	if r.Missed > 0 {
		w.logger.Warn("the runner's watcher had not reported all changes of files", "session", ref.Session, "folders", r.Missed)
	}
	if r.Diverged {
		w.logger.Error("the edits of a runner did not make the tree that it had found: the whole tree was taken again", "session", ref.Session, "previous", previous)
	}
	for _, s := range r.Skips {
		w.logger.Warn("not in the snapshot", "session", ref.Session, "path", s.Path, "reason", s.Reason)
	}
	return contents.Snapshot{ID: r.ID, Files: r.Files, Bytes: r.Bytes, NewBytes: r.NewBytes, Stored: r.Stored, Skipped: r.Skipped, Missed: r.Missed, Diverged: r.Diverged}, nil
}

// Restore fills a sandbox from a snapshot, or from some of its trees.
func (w *Workspaces) Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.TreeName) (uint32, error) {
	r, err := workspace.Restore(ctx, box, w.store, ref.Tenant, ref.Session, id, trees...)
	return r.Files, err
}

// Put writes the file of a file_put into the workspace of a sandbox, or unpacks its archive there.
func (w *Workspaces) Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence contents.Fence) error {
	content, err := w.store.Get(ctx, f.Object)
	if errors.Is(err, workspace.ErrNotFound) {
		return fmt.Errorf("%w: the content is no longer in the object store", contents.ErrRefused)
	}
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // read to its end, or given up
	checked := &checkedContent{r: content, sum: sha256.New(), want: f.SHA256, fence: func() error { return fence(ctx) }, asked: time.Now()}
	if f.Archive {
		err = workspace.UnpackTar(ctx, box, f.Path, checked)
	} else {
		err = box.Files().Put(ctx, f.Path, checked)
	}
	var refused *workspace.RefusedError
	if errors.As(err, &refused) || errors.Is(err, sandbox.ErrOutsideWorkspace) || errors.Is(err, errUploadMismatch) {
		return fmt.Errorf("%w: %w", contents.ErrRefused, err)
	}
	return err
}

// Provide copies the transcript with which the agent begins into a sandbox.
func (w *Workspaces) Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error {
	content, err := w.store.Get(ctx, t.Object)
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // read to its end, or given up
	return workspace.ProvideTranscript(ctx, box, t.SHA256, content)
}

// errUploadMismatch is returned for content whose SHA-256 differs from that of the upload.
var errUploadMismatch = errors.New("its content is not what was uploaded")

// fenceEvery is the time after which the fence is called again while content is read, because the files of an archive
// are written one by one.
const fenceEvery = time.Second

// checkedContent is a reader of uploaded content. It fails at the end if the hash is wrong, and at once if the fence
// returns an error, so that the content is not put in place.
type checkedContent struct {
	r     io.Reader
	sum   hash.Hash
	want  string
	fence func() error
	asked time.Time // time of the last call of the fence
}

func (c *checkedContent) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.sum.Write(p[:n]) //nolint:errcheck // a hash does not fail
	end := errors.Is(err, io.EOF)
	if end && hex.EncodeToString(c.sum.Sum(nil)) != c.want {
		return n, errUploadMismatch
	}
	if end || time.Since(c.asked) >= fenceEvery {
		if ferr := c.fence(); ferr != nil {
			return 0, ferr
		}
		c.asked = time.Now()
	}
	return n, err
}
