// Package contents moves the contents of workspaces: snapshots into the object store, and snapshots, file changes and the files of
// an agent into sandboxes. Each move returns the event that records it.
package contents

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
)

// Store stores the contents of workspaces in the object store, and writes them into sandboxes.
type Store interface {
	// Snapshot stores what has changed since the previous snapshot; "" is none. If full is set, the runner looks at every file, even
	// at those whose changes it would have been told of.
	Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string, full bool) (Snapshot, error)
	// Restore fills a sandbox from a snapshot, or from some of its trees, and returns the number of files.
	Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.TreeName) (uint32, error)
	// Put writes a file, or unpacks an archive, that is in the object store. The error wraps ErrRefused if the content or the path
	// is invalid. Put calls fence before it puts the content in place, and returns its error.
	Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence Fence) error
	// Provide copies the transcript that the agent starts with into a sandbox. The error wraps workspace.ErrNotFound if it is not in
	// the object store any more.
	Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error
}

// A Fence returns an error once the caller may no longer write to a workspace, because another executor has claimed the
// session's runs.
type Fence func(ctx context.Context) error

// ErrRefused is wrapped by errors about content that a workspace can never contain.
var ErrRefused = errors.New("refused")

// A Snapshot describes a snapshot of a workspace that Store has stored.
type Snapshot struct {
	ID       string
	Files    uint32
	Bytes    uint64 // of all files
	NewBytes uint64 // that were not in the store
	Stored   uint64 // size of the objects that were added
	Skipped  uint32 // files that are not in the snapshot: unreadable, or of a kind that is not kept
	Missed   uint32 // folders whose changes only a walk over all files has found
	Diverged bool   // the whole tree was taken again, because the edits did not make the tree that the runner had found
}

// Timeout is the time limit of one snapshot, one restore, or the change of one file.
const Timeout = 10 * time.Minute

// A Mover takes snapshots of workspaces, restores them, and applies the file changes of clients. It is safe for
// concurrent use.
type Mover struct {
	Store    Store
	Sessions eventlog.Sessions
	Now      func() time.Time
	// Measured is called after each snapshot with its duration. After an error the snapshot is empty.
	Measured func(ctx context.Context, took time.Duration, s Snapshot, err error)
}

// Snapshot stores a snapshot of a session's sandbox. The event names the last file change that l has as applied: one that arrives
// during the snapshot is not in it.
func (m *Mover) Snapshot(ctx context.Context, l *eventlog.Loaded, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	return m.snapshot(ctx, l, box, reason, false)
}

// FullSnapshot is like Snapshot, and looks at every file. It is called before a sandbox is given up: a change that is not in this
// snapshot is lost.
func (m *Mover) FullSnapshot(ctx context.Context, l *eventlog.Loaded, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	return m.snapshot(ctx, l, box, reason, true)
}

func (m *Mover) snapshot(ctx context.Context, l *eventlog.Loaded, box sandbox.Sandbox, reason string, full bool) (events.WorkspaceSynced, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	began := m.Now()
	s, err := m.Store.Snapshot(ctx, box, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, l.Run.Snapshot.ID, full)
	m.Measured(ctx, m.Now().Sub(began), s, err)
	if err != nil {
		return events.WorkspaceSynced{}, fmt.Errorf("snapshot of %s: %w", box.ID(), err)
	}
	return events.WorkspaceSynced{
		Snapshot: s.ID, Reason: reason, Request: l.Life.Syncs, Applied: l.Run.Applied, Files: s.Files, Bytes: s.Bytes, NewBytes: s.NewBytes, Stored: s.Stored, Skipped: s.Skipped,
		DurationMs: uint32(m.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by Timeout
	}, nil
}

// Apply applies the file changes of a session that are not applied yet, and returns the event that records it; nil if there are none.
// A change that is refused counts as applied; the event names it.
func (m *Mover) Apply(ctx context.Context, l *eventlog.Loaded, box sandbox.Sandbox) (*events.FilesApplied, error) {
	list, err := m.Sessions.FileChanges(ctx, l, l.Life.After(l.Run.Applied))
	if err != nil || len(list) == 0 {
		return nil, err
	}
	fence := m.fence(l)
	done := &events.FilesApplied{}
	var refused []string
	for _, e := range list {
		n, path, err := m.change(ctx, box, e, fence)
		switch {
		case errors.Is(err, ErrRefused), errors.Is(err, sandbox.ErrOutsideWorkspace):
			refused = append(refused, fmt.Sprintf("%s: %v", path, err))
		case err != nil:
			return nil, fmt.Errorf("put %s into the workspace: %w", path, err)
		}
		done.N = n
	}
	done.Error = strings.Join(refused, "; ")
	return done, nil
}

// fence returns a Fence for the epoch of l. An executor that was suspended while another one claimed the session's runs must not
// overwrite what the other one's turn has written.
func (m *Mover) fence(l *eventlog.Loaded) Fence {
	return func(ctx context.Context) error {
		now, err := m.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.Leader)
		if err != nil {
			return err
		}
		if now.Run.Epoch != l.Run.Epoch {
			return run.ErrFenced
		}
		return nil
	}
}

// change applies one change of a workspace file, an event file_put or file_removed, in a sandbox.
func (m *Mover) change(ctx context.Context, box sandbox.Sandbox, e events.Event, fence Fence) (n uint32, path string, err error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	switch d := e.Data.(type) {
	case events.FilePut:
		return d.N, d.Path, m.Store.Put(ctx, box, d, fence)
	case events.FileRemoved:
		if err := fence(ctx); err != nil {
			return d.N, d.Path, err
		}
		err := box.Files().Remove(ctx, d.Path)
		if errors.Is(err, sandbox.ErrNotFound) {
			err = nil
		}
		return d.N, d.Path, err
	}
	return 0, "", nil
}

// A Source is a snapshot from which a new workspace is filled, or the part of a snapshot to use.
type Source struct {
	session  string
	snapshot string
	trees    []workspace.TreeName // none for all
}

// HasFiles reports whether the files of the workspace are part of the source. Otherwise it has the agent's records
// only.
func (s Source) HasFiles() bool {
	return len(s.trees) == 0 || slices.Contains(s.trees, workspace.TreeFiles)
}

// IsUnfilled reports whether a session's workspace is new, and nothing was put into it yet. A folder of the host is never filled: it
// belongs to a person. The workspace of a fork is unfilled until the log records that it was filled: no agent has run in it until
// then, and an executor may have died before it could record that.
func IsUnfilled(l *eventlog.Loaded) bool {
	return l.Life.Options.HostPath == "" && (l.Run.Sandbox.Empty || l.Life.Fork != nil && !l.Run.Filled)
}

// Sources returns what an unfilled workspace is filled from: the session's last snapshot, or for a fork without one the snapshots
// that it began with.
func Sources(l *eventlog.Loaded) []Source {
	own, f := l.Run.Snapshot.ID, l.Life.Fork
	switch {
	case !IsUnfilled(l):
		return nil
	case own != "":
		return []Source{{session: l.ID, snapshot: own}}
	case f == nil:
		return nil
	case f.Snapshot != "" && f.Snapshot == f.Records && f.Files() == f.State():
		return []Source{{session: f.Files(), snapshot: f.Snapshot}}
	}
	var list []Source
	if f.Snapshot != "" {
		list = append(list, Source{f.Files(), f.Snapshot, []workspace.TreeName{workspace.TreeFiles}})
	}
	if f.Records != "" {
		list = append(list, Source{f.State(), f.Records, []workspace.TreeName{workspace.TreeRecords}})
	}
	return list
}

// Restore fills a new workspace from at least one source.
func (m *Mover) Restore(ctx context.Context, l *eventlog.Loaded, box sandbox.Sandbox, from []Source) (events.WorkspaceRestored, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	began := m.Now()
	restored := events.WorkspaceRestored{SandboxID: box.ID()}
	for _, s := range from {
		files, err := m.Store.Restore(ctx, box, topology.SessionRef{Tenant: l.Tenant, Session: s.session}, s.snapshot, s.trees...)
		if errors.Is(err, workspace.ErrNotFound) {
			err = &sandbox.Error{Code: command.CodeSnapshotGone, Message: err.Error(), Err: err}
		}
		if err != nil {
			return restored, fmt.Errorf("restore snapshot %s of session %s: %w", s.snapshot, s.session, err)
		}
		restored.Files += files
	}
	if first := from[0]; first.HasFiles() {
		if restored.Snapshot = first.snapshot; first.session != l.ID {
			restored.Session = first.session
		}
	}
	if last := from[len(from)-1]; slices.Contains(last.trees, workspace.TreeRecords) {
		restored.Records, restored.RecordsSession = last.snapshot, last.session
	}
	restored.DurationMs = uint32(m.Now().Sub(began).Milliseconds()) //nolint:gosec // bounded by Timeout
	return restored, nil
}

// Write writes the files of an agent's definition into a new workspace.
func (m *Mover) Write(ctx context.Context, box sandbox.Sandbox, files []events.FileSpec) (events.WorkspaceRestored, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	began := m.Now()
	archive, err := pack(files)
	if err == nil {
		err = workspace.UnpackTar(ctx, box, "", archive)
	}
	if err != nil {
		return events.WorkspaceRestored{}, fmt.Errorf("lay down the agent's files: %w", err)
	}
	return events.WorkspaceRestored{
		SandboxID: box.ID(), Files: uint32(len(files)), //nolint:gosec // the definition's check bounds it
		DurationMs: uint32(m.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by Timeout
	}, nil
}

// pack returns the files of a definition as a tar archive.
func pack(files []events.FileSpec) (io.Reader, error) {
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	for _, f := range files {
		content := []byte(f.Content)
		if f.ContentBase64 != "" {
			var err error
			if content, err = base64.StdEncoding.DecodeString(f.ContentBase64); err != nil {
				return nil, fmt.Errorf("%s: %w", f.Path, err)
			}
		}
		mode := int64(cmp.Or(f.Mode, 0o644))
		if err := out.WriteHeader(&tar.Header{Name: f.Path, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(content))}); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Path, err)
		}
		if _, err := out.Write(content); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	return &b, out.Close()
}
