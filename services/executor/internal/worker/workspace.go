package worker

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
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// Workspaces moves workspaces between sandboxes and the object store.
type Workspaces interface {
	// Snapshot stores what changed since the previous snapshot ("" for none).
	Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string) (Snapshot, error)
	// Restore fills a sandbox from a snapshot, or from some of its trees, and gives the number of files.
	Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.Tree) (uint32, error)
	// Put writes a file, or unpacks an archive, that is in the object store. An
	// error that wraps ErrRefused is the content's or the path's own fault. The fence is
	// asked before the content is put in place; its error is Put's.
	Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence Fence) error
	// Provide gives a sandbox the transcript that its agent is to begin with. An error that wraps
	// workspace.ErrNotFound is one that is no longer in the object store.
	Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error
}

// Fence fails once the caller may no longer write to a workspace.
type Fence func(ctx context.Context) error

// ErrRefused is content that can never be put into a workspace.
var ErrRefused = errors.New("refused")

// Snapshot is what Workspaces stored.
type Snapshot struct {
	ID       string
	Files    uint32
	Bytes    uint64 // of all files
	NewBytes uint64 // that had to be stored
	Stored   uint64 // of the objects that were added
	Skipped  uint32 // files that it does not hold: unreadable, or of a kind that is not kept
}

// snapshotWithin bounds one snapshot, restore or file.
const snapshotWithin = 10 * time.Minute

// Reasons of workspace_synced.
const (
	syncTurn     = "turn"
	syncInterval = "interval"
	syncAsked    = "requested"
	syncMaxAge   = "max_age"
	syncStopped  = "stopped"
)

// snapshot takes one of a session's sandbox and gives the event that says so.
// What life and run say is as loaded before: a file change that comes meanwhile is not counted in.
func (w *Worker) snapshot(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began := w.d.Now()
	s, err := w.d.Workspaces.Snapshot(ctx, box, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, l.Run.Snapshot.ID)
	w.metrics.snapshot(ctx, w.d.Now().Sub(began), s.NewBytes, err)
	if err != nil {
		return events.WorkspaceSynced{}, fmt.Errorf("snapshot of %s: %w", box.ID(), err)
	}
	return events.WorkspaceSynced{
		Snapshot: s.ID, Reason: reason, Request: l.Life.Syncs, Applied: l.Run.Applied, Files: s.Files, Bytes: s.Bytes, NewBytes: s.NewBytes, Stored: s.Stored, Skipped: s.Skipped,
		DurationMs: uint32(w.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
	}, nil
}

// apply puts into a workspace what file changes say, and gives the event that
// says so; nil if there are none. What is refused is told and counts as applied.
func (w *Worker) apply(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox) (*events.FilesApplied, error) {
	list, err := w.d.Sessions.FileChanges(ctx, l, l.Life.After(l.Run.Applied))
	if err != nil || len(list) == 0 {
		return nil, err
	}
	fence := w.fence(l)
	done := &events.FilesApplied{}
	var refused []string
	for _, e := range list {
		n, path, err := w.change(ctx, box, e, fence)
		switch {
		case errors.Is(err, ErrRefused), errors.Is(err, sandbox.ErrOutside):
			refused = append(refused, fmt.Sprintf("%s: %v", path, err))
		case err != nil:
			return nil, fmt.Errorf("put %s into the workspace: %w", path, err)
		}
		done.N = n
	}
	done.Error = strings.Join(refused, "; ")
	return done, nil
}

// fence returns a Fence of an executor that writes under the epoch of l. An executor that stood still while another one
// claimed the session's runs must not write over what the other one's turn did.
func (w *Worker) fence(l eventlog.Loaded) Fence {
	return func(ctx context.Context) error {
		now, err := w.d.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.Leader)
		if err != nil {
			return err
		}
		if now.Run.Epoch != l.Run.Epoch {
			return run.ErrFenced
		}
		return nil
	}
}

// change applies one event.
func (w *Worker) change(ctx context.Context, box sandbox.Sandbox, e events.Event, fence Fence) (n uint32, path string, err error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	switch d := e.Data.(type) {
	case events.FilePut:
		return d.N, d.Path, w.d.Workspaces.Put(ctx, box, d, fence)
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

// sync does what is due to a sandbox at rest: file changes, then a snapshot. It returns runlog.ErrChanged when something else is
// due meanwhile: a turn puts the file changes in itself, and ends with a snapshot.
func (w *Worker) sync(ctx context.Context, l eventlog.Loaded, b *handling.Session) error {
	if w.d.Workspaces == nil {
		return nil
	}
	if err := w.reachable(l.Run.Sandbox); err != nil {
		return err
	}
	if err := w.mayUse(ctx, l); err != nil {
		return err
	}
	release, err := w.upkeep.Acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer release()
	bus.ReleaseSlot(ctx)
	w.handling.SetSyncing(b, true)
	defer w.handling.SetSyncing(b, false)
	if len(l.Life.After(l.Run.Applied)) > 0 {
		if err := w.announce(ctx, &l); err != nil {
			return err
		}
	}
	box, err := w.revive(ctx, l)
	if err != nil {
		return err
	}
	work, stop := w.interruptible(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, b, delayedBySnapshot)
	defer stop()
	facts, err := w.syncAt(work, l, box)
	if err != nil && work.Err() != nil && ctx.Err() == nil {
		return runlog.ErrChanged
	}
	if err != nil {
		return err
	}
	return w.runlog.AppendFacts(ctx, l, facts...)
}

// announce says in the log, before the workspace is written to, that this executor does so. The commit takes part in the
// order of claims: one that was decided before it is refused, and whoever claims the session's runs later knows whom to ask.
func (w *Worker) announce(ctx context.Context, l *eventlog.Loaded) error {
	started := events.WorkspaceSyncStarted{SandboxID: l.Run.Sandbox.ID, Executor: w.cfg.Executor}
	d, err := w.runlog.Decide(l.Run, run.Record{Epoch: l.Run.Epoch + 1, Events: w.runlog.Events("", started)})
	if err != nil {
		return runlog.ErrChanged
	}
	return w.runlog.Append(ctx, l, d)
}

// syncAt puts file changes into a sandbox at rest and takes a snapshot; it returns the events that say so.
func (w *Worker) syncAt(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox) ([]events.Payload, error) {
	var facts []events.Payload
	if from := sources(l); len(from) > 0 { // a turn made the sandbox, and was ended before it could fill it
		restored, err := w.restore(ctx, l, box, from)
		if err != nil {
			return nil, err
		}
		facts = append(facts, restored)
	}
	done, err := w.apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if done != nil {
		facts = append(facts, *done)
		l.Run.Applied = done.N
	}
	synced, err := w.snapshot(ctx, l, box, syncAsked)
	if err != nil {
		return nil, err
	}
	return append(facts, synced), nil
}

// revive finds a session's sandbox, and starts it again if it has ended, for
// what is in its workspace. A warm agent may be gone with it: the next turn tells.
func (w *Worker) revive(ctx context.Context, l eventlog.Loaded) (sandbox.Sandbox, error) {
	sb := l.Run.Sandbox
	if err := w.sandboxes.Resume(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.Unstopped {
		ref := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}
		if err := w.dialer.Stop(ctx, sb, ref, l.Run.Epoch); err != nil {
			return nil, fmt.Errorf("stop the agent of an execution that has ended: %w", err)
		}
	}
	box, err := w.d.Sandbox.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		box, err = w.d.Sandbox.Create(ctx, w.spec(l, sb.ID))
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	return box, nil
}

// spec is what a session's sandbox is made from.
func (w *Worker) spec(l eventlog.Loaded, id string) sandbox.Spec {
	spec := sandbox.Spec{
		ID: id, Image: l.Life.Options.Image, HostPath: l.Life.Options.HostPath,
		Labels: sandbox.Labels{Tenant: l.Tenant, Session: l.ID, Engine: w.cfg.Engine, Epoch: l.Run.Epoch},
	}
	if l.Run.Lost.Engine == w.cfg.Engine {
		spec.Workspace = l.Run.Lost.Workspace
	}
	if sb := l.Run.Sandbox; sb.ID == id && sb.Workspace != "" && sb.Workspace != id {
		spec.Workspace = sb.Workspace
	}
	return spec
}

// last takes the snapshot before a sandbox is given up; nil where none is wanted.
func (w *Worker) last(ctx context.Context, l eventlog.Loaded, reason string) (*events.WorkspaceSynced, error) {
	if w.d.Workspaces == nil || l.Life.Status == session.Deleted || l.Run.Sandbox.Journal == "" || len(sources(l)) > 0 {
		return nil, nil // of a workspace that was not filled, the snapshot that is there is the last
	}
	box, err := w.revive(ctx, l)
	if err != nil {
		return nil, err
	}
	s, err := w.snapshot(ctx, l, box, reason)
	if err != nil {
		return nil, err
	}
	return &s, nil
}

// prepare fills a new workspace, and puts in what file changes say.
func (t *turn) prepare(ctx context.Context) error {
	sb := t.l.Run.Sandbox
	if err := t.layTranscript(ctx); err != nil {
		return err
	}
	from := sources(t.l)
	furnish := unfilled(t.l) && len(t.resolved.Definition.Files) > 0 && !slices.ContainsFunc(from, source.hasFiles)
	if t.w.d.Workspaces == nil || len(from) == 0 && !furnish && len(t.l.Life.After(t.l.Run.Applied)) == 0 {
		return nil
	}
	box, err := t.w.d.Sandbox.Attach(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	// All that fills the workspace becomes true at once: an executor that takes over before that begins anew.
	var filled []events.Payload
	if len(from) > 0 {
		restored, err := t.restore(ctx, box, from)
		if err != nil {
			return err
		}
		filled = append(filled, restored)
	}
	if furnish {
		furnished, err := t.furnish(ctx, box)
		if err != nil {
			return err
		}
		filled = append(filled, furnished)
	}
	if len(filled) > 0 {
		if err := t.say(ctx, filled...); err != nil {
			return err
		}
	}
	done, err := t.w.apply(ctx, t.l, box)
	if err != nil || done == nil {
		return err
	}
	return t.say(ctx, *done)
}

// layTranscript gives the sandbox the transcript that the agent is to begin with. The file is in no snapshot, and nothing in the log says that a
// sandbox has it: a turn provides it as long as the agent has no session of its own.
func (t *turn) layTranscript(ctx context.Context) error {
	if _, fork := t.conversation(); t.w.d.Workspaces == nil || fork == nil || !fork.Provided {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	box, err := t.w.d.Sandbox.Attach(ctx, t.l.Run.Sandbox.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", t.l.Run.Sandbox.ID, err)
	}
	err = t.w.d.Workspaces.Provide(ctx, box, *t.l.Life.Transcript)
	if errors.Is(err, workspace.ErrNotFound) {
		err = &sandbox.Error{Code: codeTranscriptLost, Message: "the transcript that the session begins with is no longer in the object store", Err: err}
	}
	if err != nil {
		return t.broken(ctx, box.ID(), fmt.Errorf("give the agent its transcript: %w", err))
	}
	return nil
}

// codeTranscriptLost is the code of an execution without the conversation that it was to go on with.
const codeTranscriptLost = "TRANSCRIPT_LOST"

// source is a snapshot, or a part of one, that a new workspace is filled from.
type source struct {
	session  string
	snapshot string
	trees    []workspace.Tree // none for all
}

func (s source) hasFiles() bool {
	return len(s.trees) == 0 || slices.Contains(s.trees, workspace.Files)
}

// unfilled reports whether a session's workspace is new, and nothing was put into it yet. That of a fork is as long as the log
// does not say that it was filled: no agent has run in it then, so it may be filled whatever is in it. An executor may have
// died before it could say that it filled it, or that it was new. A folder of the host belongs to a person: nothing but what
// was asked for is put into it.
func unfilled(l eventlog.Loaded) bool {
	return l.Life.Options.HostPath == "" && (l.Run.Sandbox.Empty || l.Life.Fork != nil && !l.Run.Filled)
}

// sources returns what a new workspace is filled from: the session's last snapshot; of a fork without one, what it began with.
func sources(l eventlog.Loaded) []source {
	own, f := l.Run.Snapshot.ID, l.Life.Fork
	switch {
	case !unfilled(l):
		return nil
	case own != "":
		return []source{{session: l.ID, snapshot: own}}
	case f == nil:
		return nil
	case f.Snapshot != "" && f.Snapshot == f.Records && f.Files() == f.State():
		return []source{{session: f.Files(), snapshot: f.Snapshot}}
	}
	var list []source
	if f.Snapshot != "" {
		list = append(list, source{f.Files(), f.Snapshot, []workspace.Tree{workspace.Files}})
	}
	if f.Records != "" {
		list = append(list, source{f.State(), f.Records, []workspace.Tree{workspace.Records}})
	}
	return list
}

// restore fills a new workspace, in which nothing runs yet, as long as the execution is wanted.
func (t *turn) restore(ctx context.Context, box sandbox.Sandbox, from []source) (events.WorkspaceRestored, error) {
	l := t.l
	var restored events.WorkspaceRestored
	err := t.whileWanted(ctx, func(ctx context.Context) (err error) {
		if restored, err = t.w.restore(ctx, l, box, from); err != nil {
			err = t.broken(ctx, box.ID(), err)
		}
		return err
	})
	return restored, err
}

// restore fills a new workspace and returns the event that says so.
func (w *Worker) restore(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox, from []source) (events.WorkspaceRestored, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began := w.d.Now()
	restored := events.WorkspaceRestored{SandboxID: box.ID()}
	for _, s := range from {
		files, err := w.d.Workspaces.Restore(ctx, box, topology.SessionRef{Tenant: l.Tenant, Session: s.session}, s.snapshot, s.trees...)
		if errors.Is(err, workspace.ErrNotFound) {
			err = &sandbox.Error{Code: command.CodeSnapshotGone, Message: err.Error(), Err: err}
		}
		if err != nil {
			return restored, fmt.Errorf("restore snapshot %s of session %s: %w", s.snapshot, s.session, err)
		}
		restored.Files += files
	}
	if first := from[0]; first.hasFiles() {
		if restored.Snapshot = first.snapshot; first.session != l.ID {
			restored.Session = first.session
		}
	}
	if last := from[len(from)-1]; slices.Contains(last.trees, workspace.Records) {
		restored.Records, restored.RecordsSession = last.snapshot, last.session
	}
	restored.DurationMs = uint32(w.d.Now().Sub(began).Milliseconds()) //nolint:gosec // bounded by snapshotWithin
	return restored, nil
}

// furnish lays down the files that the agent's definition has, and returns the event that says so.
func (t *turn) furnish(ctx context.Context, box sandbox.Sandbox) (events.Payload, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began := t.w.d.Now()
	archive, err := packed(t.resolved.Definition.Files)
	if err == nil {
		err = workspace.Unpack(ctx, box, "", archive)
	}
	if err != nil {
		return nil, t.broken(ctx, box.ID(), fmt.Errorf("lay down the agent's files: %w", err))
	}
	return events.WorkspaceRestored{
		SandboxID: box.ID(), Files: uint32(len(t.resolved.Definition.Files)), //nolint:gosec // the definition's check bounds it
		DurationMs: uint32(t.w.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
	}, nil
}

// packed is a definition's files as a tar.
func packed(files []events.FileSpec) (io.Reader, error) {
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
