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

// A Store stores the content of workspaces in the object store, and writes it into sandboxes. It implements contents.Store.
type Store struct {
	store   workspace.Store
	room    *storage.Watch
	version int
	logger  *slog.Logger
}

var _ contents.Store = (*Store)(nil)

// New returns a Store that writes snapshots in the format version; see workspace.Options. The caller must call Open before
// any method that uses the object store.
func New(version int, log *slog.Logger) *Store {
	return &Store{version: version, logger: log}
}

// CheckRoom makes snapshots fail while the store of NATS has only its reserve left. It must be called before Open.
func (w *Store) CheckRoom(room *storage.Watch) { w.room = room }

// Open opens the object bucket with the snapshots and files of workspaces.
func (w *Store) Open(ctx context.Context, js jetstream.JetStream) error {
	store, err := natsstore.Open(ctx, js, topology.BucketWorkspaces)
	if err != nil {
		return err
	}
	store.SetRoomCheck(func(ctx context.Context) error { return w.room.Check(ctx, 0) })
	w.store = store
	return nil
}

// Snapshot stores what has changed in a sandbox's workspace since the previous snapshot. If full is true, the runner looks at
// every file.
func (w *Store) Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string, full bool) (contents.Snapshot, error) {
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

// Restore fills the workspace of a sandbox from a snapshot, or from only the given trees of the snapshot. It returns the number
// of files.
func (w *Store) Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.TreeName) (uint32, error) {
	r, err := workspace.Restore(ctx, box, w.store, ref.Tenant, ref.Session, id, trees...)
	return r.Files, err
}

// Put writes the uploaded file of a file_put event into the workspace of a sandbox, or unpacks the uploaded archive there. It
// calls fence before it puts the content in place.
func (w *Store) Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence contents.Fence) error {
	content, err := w.store.Get(ctx, f.Object)
	if errors.Is(err, workspace.ErrNotFound) {
		return fmt.Errorf("%w: the content is no longer in the object store", contents.ErrInvalidContent)
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
		return fmt.Errorf("%w: %w", contents.ErrInvalidContent, err)
	}
	return err
}

// Provide copies the transcript that a client uploaded for the session into a sandbox.
func (w *Store) Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error {
	content, err := w.store.Get(ctx, t.Object)
	if err != nil {
		return err
	}
	defer content.Close() //nolint:errcheck // read to its end, or given up
	return workspace.ProvideTranscript(ctx, box, t.SHA256, content)
}

// errUploadMismatch is returned if the SHA-256 of stored content differs from that of the upload.
var errUploadMismatch = errors.New("its content is not what was uploaded")

// fenceInterval is the time after which the fence is called again while uploaded content is read, because the files of an
// archive are written one after the other.
const fenceInterval = time.Second

// checkedContent is a reader of uploaded content. It returns an error at the end if the content has the wrong hash, and at once
// if the fence returns an error, so that the content is not put in place.
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
	if end || time.Since(c.asked) >= fenceInterval {
		if ferr := c.fence(); ferr != nil {
			return 0, ferr
		}
		c.asked = time.Now()
	}
	return n, err
}
