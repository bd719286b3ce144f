package holder

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
)

// Workspaces moves workspaces between sandboxes and the object store.
type Workspaces interface {
	// Snapshot stores what changed since the previous snapshot ("" for none).
	Snapshot(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, previous string) (Snapshot, error)
	// Restore fills a sandbox from a snapshot and gives the number of files.
	Restore(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, id string) (uint32, error)
	// Put writes a file, or unpacks an archive, that is in the object store. An
	// error that wraps ErrRefused is the content's or the path's own fault. The fence is
	// asked before the content is put in place; its error is Put's.
	Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence Fence) error
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
func (h *Holder) snapshot(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox, reason string) (events.WorkspaceSynced, error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began := h.d.Now()
	s, err := h.d.Workspaces.Snapshot(ctx, box, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, l.Run.Snapshot.ID)
	h.metrics.snapshot(ctx, h.d.Now().Sub(began), s.NewBytes, err)
	if err != nil {
		return events.WorkspaceSynced{}, fmt.Errorf("snapshot of %s: %w", box.ID(), err)
	}
	return events.WorkspaceSynced{
		Snapshot: s.ID, Reason: reason, Request: l.Life.Syncs, Applied: l.Run.Applied, Files: s.Files, Bytes: s.Bytes, NewBytes: s.NewBytes, Stored: s.Stored, Skipped: s.Skipped,
		DurationMs: uint32(h.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
	}, nil
}

// apply puts into a workspace what file changes say, and gives the event that
// says so; nil if there are none. What is refused is told and counts as applied.
func (h *Holder) apply(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox) (*events.FilesApplied, error) {
	list, err := h.d.Sessions.FileChanges(ctx, l, l.Life.After(l.Run.Applied))
	if err != nil || len(list) == 0 {
		return nil, err
	}
	fence := h.fence(l)
	done := &events.FilesApplied{}
	var refused []string
	for _, e := range list {
		n, path, err := h.change(ctx, box, e, fence)
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
func (h *Holder) fence(l eventlog.Loaded) Fence {
	return func(ctx context.Context) error {
		now, err := h.d.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.Leader)
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
func (h *Holder) change(ctx context.Context, box sandbox.Sandbox, e events.Event, fence Fence) (n uint32, path string, err error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	switch d := e.Data.(type) {
	case events.FilePut:
		return d.N, d.Path, h.d.Workspaces.Put(ctx, box, d, fence)
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

// sync does what is due to a sandbox at rest: file changes, then a snapshot. It returns errAgain when something else is
// due meanwhile: a turn puts the file changes in itself, and ends with a snapshot.
func (h *Holder) sync(ctx context.Context, l eventlog.Loaded, b *busy) error {
	if h.d.Workspaces == nil {
		return nil
	}
	if err := h.reachable(l.Run.Sandbox); err != nil {
		return err
	}
	if err := h.mayUse(ctx, l); err != nil {
		return err
	}
	release, err := h.upkeep.acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer release()
	bus.ReleaseSlot(ctx)
	h.handling.syncs(b, true)
	defer h.handling.syncs(b, false)
	if len(l.Life.After(l.Run.Applied)) > 0 {
		if err := h.announce(ctx, &l); err != nil {
			return err
		}
	}
	box, err := h.revive(ctx, l)
	if err != nil {
		return err
	}
	work, stop := h.interruptible(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, b, delayedBySnapshot)
	defer stop()
	facts, err := h.syncAt(work, l, box)
	if err != nil && work.Err() != nil && ctx.Err() == nil {
		return errAgain
	}
	if err != nil {
		return err
	}
	return h.atRest(ctx, l, facts...)
}

// announce says in the log, before the workspace is written to, that this executor does so. The commit takes part in the
// order of claims: one that was decided before it is refused, and whoever claims the session's runs later knows whom to ask.
func (h *Holder) announce(ctx context.Context, l *eventlog.Loaded) error {
	m := events.NewMint(h.meta())
	m.Add("", events.WorkspaceSyncStarted{SandboxID: l.Run.Sandbox.ID, Executor: h.cfg.Executor})
	d, err := run.Decide(l.Run, run.Record{Epoch: l.Run.Epoch + 1, Events: m.Events()})
	if err != nil {
		return errAgain
	}
	return h.first(ctx, l, d)
}

// syncAt puts file changes into a sandbox at rest and takes a snapshot; it returns the events that say so.
func (h *Holder) syncAt(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox) ([]events.Payload, error) {
	done, err := h.apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	var facts []events.Payload
	if done != nil {
		facts = append(facts, *done)
		l.Run.Applied = done.N
	}
	synced, err := h.snapshot(ctx, l, box, syncAsked)
	if err != nil {
		return nil, err
	}
	return append(facts, synced), nil
}

// atRest records facts about a session in which nothing runs, under the next epoch.
func (h *Holder) atRest(ctx context.Context, l eventlog.Loaded, facts ...events.Payload) error {
	m := events.NewMint(h.meta())
	for _, f := range facts {
		m.Add("", f)
	}
	return h.record(ctx, l, m.Events())
}

func (h *Holder) record(ctx context.Context, l eventlog.Loaded, list []events.Event) error {
	d, err := run.Decide(l.Run, run.Record{Epoch: l.Run.Epoch + 1, Events: list})
	if err != nil {
		return errAgain
	}
	return h.first(ctx, &l, d)
}

// revive finds a session's sandbox, and starts it again if it has ended, for
// what is in its workspace. A warm agent may be gone with it: the next turn tells.
func (h *Holder) revive(ctx context.Context, l eventlog.Loaded) (sandbox.Sandbox, error) {
	sb := l.Run.Sandbox
	if err := h.unpause(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.Unstopped {
		ref := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}
		if err := h.stopAgent(ctx, sb, ref, l.Run.Epoch); err != nil {
			return nil, fmt.Errorf("stop the agent of an execution that has ended: %w", err)
		}
	}
	box, err := h.d.Sandbox.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		box, err = h.d.Sandbox.Create(ctx, h.spec(l, sb.ID))
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	return box, nil
}

// spec is what a session's sandbox is made from.
func (h *Holder) spec(l eventlog.Loaded, id string) sandbox.Spec {
	spec := sandbox.Spec{
		ID: id, Image: l.Life.Options.Image, HostPath: l.Life.Options.HostPath,
		Labels: sandbox.Labels{Tenant: l.Tenant, Session: l.ID, Engine: h.cfg.Engine, Epoch: l.Run.Epoch},
	}
	if l.Run.Lost.Engine == h.cfg.Engine {
		spec.Workspace = l.Run.Lost.Workspace
	}
	if sb := l.Run.Sandbox; sb.ID == id && sb.Workspace != "" && sb.Workspace != id {
		spec.Workspace = sb.Workspace
	}
	return spec
}

// keeps tells whether the provider keeps workspaces by session, so that no sandbox's end loses one.
func (h *Holder) keeps() bool {
	_, ok := h.d.Sandbox.(sandbox.Keeper)
	return ok
}

// last takes the snapshot before a sandbox is given up; nil where none is wanted.
func (h *Holder) last(ctx context.Context, l eventlog.Loaded, reason string) (*events.WorkspaceSynced, error) {
	if h.d.Workspaces == nil || l.Life.Status == session.Deleted || l.Run.Sandbox.Journal == "" {
		return nil, nil
	}
	box, err := h.revive(ctx, l)
	if err != nil {
		return nil, err
	}
	s, err := h.snapshot(ctx, l, box, reason)
	if err != nil {
		return nil, err
	}
	return &s, nil
}

// prepare fills a new workspace from the last snapshot, and puts in what file changes say.
func (t *turn) prepare(ctx context.Context) error {
	sb := t.l.Run.Sandbox
	// A folder of the host belongs to a person: nothing but what was asked for is put into it.
	empty := sb.Empty && t.l.Life.Options.HostPath == ""
	restore := empty && t.l.Run.Snapshot.ID != ""
	furnish := empty && !restore && len(t.is.agent.Files) > 0
	if t.h.d.Workspaces == nil || !restore && !furnish && len(t.l.Life.After(t.l.Run.Applied)) == 0 {
		return nil
	}
	box, err := t.h.d.Sandbox.Attach(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	if restore {
		if err := t.restore(ctx, box); err != nil {
			return err
		}
	}
	if furnish {
		if err := t.furnish(ctx, box); err != nil {
			return err
		}
	}
	done, err := t.h.apply(ctx, t.l, box)
	if err != nil || done == nil {
		return err
	}
	return t.say(ctx, *done)
}

// restore fills a new workspace, in which nothing runs yet, from the last snapshot.
func (t *turn) restore(ctx context.Context, box sandbox.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began, ref, snapshot := t.h.d.Now(), t.ref(), t.l.Run.Snapshot.ID
	var files uint32
	err := t.whileWanted(ctx, func(ctx context.Context) (err error) {
		files, err = t.h.d.Workspaces.Restore(ctx, box, ref, snapshot)
		if err != nil {
			err = t.broken(ctx, box.ID(), fmt.Errorf("restore snapshot %s: %w", snapshot, err))
		}
		return err
	})
	if err != nil {
		return err
	}
	return t.say(ctx, events.WorkspaceRestored{
		SandboxID: box.ID(), Snapshot: snapshot, Files: files,
		DurationMs: uint32(t.h.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
	})
}

// furnish lays down the files that the agent's definition has.
func (t *turn) furnish(ctx context.Context, box sandbox.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, snapshotWithin)
	defer cancel()
	began := t.h.d.Now()
	archive, err := packed(t.is.agent.Files)
	if err == nil {
		err = workspace.Unpack(ctx, box, "", archive)
	}
	if err != nil {
		return t.broken(ctx, box.ID(), fmt.Errorf("lay down the agent's files: %w", err))
	}
	return t.say(ctx, events.WorkspaceRestored{
		SandboxID: box.ID(), Files: uint32(len(t.is.agent.Files)), //nolint:gosec // the definition's check bounds it
		DurationMs: uint32(t.h.d.Now().Sub(began).Milliseconds()), //nolint:gosec // bounded by snapshotWithin
	})
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
