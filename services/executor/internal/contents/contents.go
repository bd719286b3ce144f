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

// Store stores the content of workspaces in the object store, and writes it into sandboxes.
type Store interface {
	// Snapshot stores what has changed since the previous snapshot; "" is none. If full is set, the runner looks at every file, even
	// at those whose changes it would have been told of.
	Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string, full bool) (Snapshot, error)
	// Restore fills a sandbox from a snapshot, or from some of its trees, and returns the number of files.
	Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.TreeName) (uint32, error)
	// Put writes a file, or unpacks an archive, that is in the object store. The error wraps ErrInvalidContent if the content or the path
	// is invalid. Put calls fence before it puts the content in place, and returns its error.
	Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence Fence) error
	// Provide copies the transcript that the agent starts with into a sandbox. The error wraps workspace.ErrNotFound if it is not in
	// the object store any more.
	Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error
}

// A Fence is a function that returns an error if the caller must not write to a workspace any more, because another executor has
// claimed the session's runs.
type Fence func(ctx context.Context) error

// ErrInvalidContent is wrapped by the error about content that can never be written to a workspace.
var ErrInvalidContent = errors.New("refused")

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

// Timeout is the time limit of one snapshot, of one restore, and of one file change.
const Timeout = 10 * time.Minute

// A Manager takes snapshots of workspaces, restores workspaces from snapshots, and applies the file changes that clients request. It
// is safe for concurrent use.
type Manager struct {
	Store    Store
	Sessions eventlog.Sessions
	Now      func() time.Time
	// Measured is called after each snapshot with its duration. After an error the snapshot is empty.
	Measured func(ctx context.Context, took time.Duration, s Snapshot, err error)
}

// TakeSnapshot stores a snapshot of the workspace in a session's sandbox. The returned event names the last file change that l has as
// applied; the snapshot does not contain later ones.
func (m *Manager) TakeSnapshot(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	return m.takeSnapshot(ctx, l, box, reason, false)
}

// TakeFullSnapshot is like TakeSnapshot, but makes the runner look at every file. It is called before a sandbox is terminated, because a
// change that is not in this snapshot is lost.
func (m *Manager) TakeFullSnapshot(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	return m.takeSnapshot(ctx, l, box, reason, true)
}

// takeSnapshot implements TakeSnapshot and TakeFullSnapshot.
func (m *Manager) takeSnapshot(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox, reason string, full bool) (events.WorkspaceSynced, error) {
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

// ApplyFileChanges applies the requested file changes of a session that were not applied yet, and returns the event that records that, or
// nil if there are none. A change that is refused counts as applied; the event names it.
func (m *Manager) ApplyFileChanges(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox) (*events.FilesApplied, error) {
	list, err := m.Sessions.FileChangeEvents(ctx, l, l.Life.ChangesAfter(l.Run.Applied))
	if err != nil || len(list) == 0 {
		return nil, err
	}
	fence := m.epochFence(l)
	done := &events.FilesApplied{}
	var refused []string
	for _, e := range list {
		n, path, err := m.applyChange(ctx, box, e, fence)
		switch {
		case errors.Is(err, ErrInvalidContent), errors.Is(err, sandbox.ErrOutsideWorkspace):
			refused = append(refused, fmt.Sprintf("%s: %v", path, err))
		case err != nil:
			return nil, fmt.Errorf("put %s into the workspace: %w", path, err)
		}
		done.N = n
	}
	done.Error = strings.Join(refused, "; ")
	return done, nil
}

// epochFence returns a Fence for the epoch of l. It keeps an executor that was suspended while another one claimed the session's runs from
// overwriting what the other one's turn has written.
func (m *Manager) epochFence(l *eventlog.SessionState) Fence {
	return func(ctx context.Context) error {
		now, err := m.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.LeaderOnly)
		if err != nil {
			return err
		}
		if now.Run.Epoch != l.Run.Epoch {
			return run.ErrFenced
		}
		return nil
	}
}

// applyChange applies one file change that a client requested, an event file_put or file_removed, to the workspace in a sandbox. It
// returns the change's number and path.
func (m *Manager) applyChange(ctx context.Context, box sandbox.Sandbox, e events.Event, fence Fence) (n uint32, path string, err error) {
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

// A RestoreSource is a snapshot, or a part of one, from which a new workspace is filled.
type RestoreSource struct {
	session  string
	snapshot string
	trees    []workspace.TreeName // none for all
}

// HasFiles reports whether the source contains files of the workspace. Otherwise it contains only the agent's records.
func (s RestoreSource) HasFiles() bool {
	return len(s.trees) == 0 || slices.Contains(s.trees, workspace.TreeFiles)
}

// IsUnfilled reports whether a session's workspace is new and nothing was written to it yet. A folder of the user's machine is never
// filled. The workspace of a fork is unfilled until the log records that it was filled, because an executor may have died before it
// could record that, and no agent runs before.
func IsUnfilled(l *eventlog.SessionState) bool {
	return l.Life.Options.HostPath == "" && (l.Run.Sandbox.Empty || l.Life.Fork != nil && !l.Run.Filled)
}

// RestoreSources returns the snapshots from which an unfilled workspace is filled: the session's last one or, for a fork that has none yet,
// those that the fork began with.
func RestoreSources(l *eventlog.SessionState) []RestoreSource {
	own, f := l.Run.Snapshot.ID, l.Life.Fork
	switch {
	case !IsUnfilled(l):
		return nil
	case own != "":
		return []RestoreSource{{session: l.ID, snapshot: own}}
	case f == nil:
		return nil
	case f.Snapshot != "" && f.Snapshot == f.Records && f.FilesOwner() == f.RecordsOwner():
		return []RestoreSource{{session: f.FilesOwner(), snapshot: f.Snapshot}}
	}
	var list []RestoreSource
	if f.Snapshot != "" {
		list = append(list, RestoreSource{f.FilesOwner(), f.Snapshot, []workspace.TreeName{workspace.TreeFiles}})
	}
	if f.Records != "" {
		list = append(list, RestoreSource{f.RecordsOwner(), f.Records, []workspace.TreeName{workspace.TreeRecords}})
	}
	return list
}

// RestoreWorkspace fills a new workspace from one or more sources, and returns the event that records it.
func (m *Manager) RestoreWorkspace(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox, from []RestoreSource) (events.WorkspaceRestored, error) {
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

// WriteDefinitionFiles writes the files of an agent's definition into a new workspace, and returns the event that records it.
func (m *Manager) WriteDefinitionFiles(ctx context.Context, box sandbox.Sandbox, files []events.FileSpec) (events.WorkspaceRestored, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	began := m.Now()
	archive, err := tarFiles(files)
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

// tarFiles returns a tar archive with the files of an agent's definition.
func tarFiles(files []events.FileSpec) (io.Reader, error) {
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
