package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/contents"
)

// fillWorkspace fills a new workspace, and applies file changes.
func (t *turn) fillWorkspace(ctx context.Context) error {
	sb := t.Session.Run.Sandbox
	if err := t.provideTranscript(ctx); err != nil {
		return err
	}
	from := contents.Sources(t.Session)
	furnish := contents.IsUnfilled(t.Session) && len(t.resolved.Definition.Files) > 0 && !slices.ContainsFunc(from, contents.Source.HasFiles)
	if t.w.deps.Workspaces == nil || len(from) == 0 && !furnish && len(t.Session.Life.After(t.Session.Run.Applied)) == 0 {
		return nil
	}
	box, err := t.w.deps.Sandbox.Attach(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	// What fills the workspace is recorded at once: an executor that takes over before that starts anew.
	var filled []events.Payload
	if len(from) > 0 {
		restored, err := t.restore(ctx, box, from)
		if err != nil {
			return err
		}
		filled = append(filled, restored)
	}
	if furnish {
		furnished, err := t.writeAgentFiles(ctx, box)
		if err != nil {
			return err
		}
		filled = append(filled, furnished)
	}
	if len(filled) > 0 {
		if err := t.AppendFacts(ctx, filled...); err != nil {
			return err
		}
	}
	done, err := t.w.contents.Apply(ctx, t.Session, box)
	if err != nil || done == nil {
		return err
	}
	return t.AppendFacts(ctx, *done)
}

// provideTranscript copies the transcript that the agent starts with into the sandbox. It is in no snapshot, and no event says that a sandbox has
// it, so that every turn provides it until the agent has a session of its own.
func (t *turn) provideTranscript(ctx context.Context) error {
	if _, fork := t.conversation(); t.w.deps.Workspaces == nil || fork == nil || !fork.Provided {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, contents.Timeout)
	defer cancel()
	box, err := t.w.deps.Sandbox.Attach(ctx, t.Session.Run.Sandbox.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", t.Session.Run.Sandbox.ID, err)
	}
	err = t.w.deps.Workspaces.Provide(ctx, box, *t.Session.Life.Transcript)
	if errors.Is(err, workspace.ErrNotFound) {
		err = &sandbox.Error{Code: codeTranscriptLost, Message: "the transcript that the session begins with is no longer in the object store", Err: err}
	}
	if err != nil {
		return t.sandboxFailed(ctx, box.ID(), fmt.Errorf("give the agent its transcript: %w", err))
	}
	return nil
}

// restore fills a new workspace, unless the execution is cancelled meanwhile.
func (t *turn) restore(ctx context.Context, box sandbox.Sandbox, from []contents.Source) (events.WorkspaceRestored, error) {
	l := t.Session
	var restored events.WorkspaceRestored
	err := t.unlessCancelled(ctx, func(ctx context.Context) (err error) {
		if restored, err = t.w.contents.Restore(ctx, l, box, from); err != nil {
			err = t.sandboxFailed(ctx, box.ID(), err)
		}
		return err
	})
	return restored, err
}

// writeAgentFiles writes the files of the agent's definition, and returns the event that records it.
func (t *turn) writeAgentFiles(ctx context.Context, box sandbox.Sandbox) (events.Payload, error) {
	written, err := t.w.contents.Write(ctx, box, t.resolved.Definition.Files)
	if err != nil {
		return nil, t.sandboxFailed(ctx, box.ID(), err)
	}
	return written, nil
}

// codeTranscriptLost is the code of an execution without the conversation that it was to continue.
const codeTranscriptLost = "TRANSCRIPT_LOST"
