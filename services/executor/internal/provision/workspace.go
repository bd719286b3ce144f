package provision

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/contents"
)

// fillWorkspace fills a new workspace from the session's snapshot and with the files of the agent's definition. Then it applies the file
// changes that clients have requested since the snapshot. It records each step in the log.
func (p *sandboxPreparation) fillWorkspace(ctx context.Context) error {
	sb := p.Session.Run.Sandbox
	if err := p.provideTranscript(ctx); err != nil {
		return err
	}
	from := contents.RestoreSources(p.Session)
	needsFiles := contents.IsUnfilled(p.Session) && len(p.Resolved.Definition.Files) > 0 && !slices.ContainsFunc(from, contents.RestoreSource.HasFiles)
	if p.Contents.Store == nil || len(from) == 0 && !needsFiles && len(p.Session.Life.ChangesAfter(p.Session.Run.Applied)) == 0 {
		return nil
	}
	box, err := p.Provider.Attach(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	// What fills the workspace is recorded at once: an executor that takes over before that starts anew.
	var filled []events.Payload
	if len(from) > 0 {
		restored, err := p.restoreWorkspace(ctx, box, from)
		if err != nil {
			return err
		}
		filled = append(filled, restored)
	}
	if needsFiles {
		written, err := p.writeAgentFiles(ctx, box)
		if err != nil {
			return err
		}
		filled = append(filled, written)
	}
	if len(filled) > 0 {
		if err := p.AppendFacts(ctx, filled...); err != nil {
			return err
		}
	}
	done, err := p.Contents.ApplyFileChanges(ctx, p.Session, box)
	if err != nil || done == nil {
		return err
	}
	return p.AppendFacts(ctx, *done)
}

// provideTranscript copies the transcript that a client uploaded for the session into the sandbox, so that the agent can continue it. No snapshot
// contains the transcript and no event records the copy, so every turn copies it until the agent has a session of its own.
func (p *sandboxPreparation) provideTranscript(ctx context.Context) error {
	if _, fork := ConversationToContinue(p.Session); p.Contents.Store == nil || fork == nil || !fork.Provided {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, contents.Timeout)
	defer cancel()
	box, err := p.Provider.Attach(ctx, p.Session.Run.Sandbox.ID)
	if err != nil {
		return fmt.Errorf("find sandbox %s: %w", p.Session.Run.Sandbox.ID, err)
	}
	err = p.Contents.Store.Provide(ctx, box, *p.Session.Life.Transcript)
	if errors.Is(err, workspace.ErrNotFound) {
		err = &sandbox.Error{Code: codeTranscriptLost, Message: "the transcript that the session begins with is no longer in the object store", Err: err}
	}
	if err != nil {
		return p.endFailedSandbox(ctx, box.ID(), fmt.Errorf("give the agent its transcript: %w", err))
	}
	return nil
}

// restoreWorkspace fills a new workspace from snapshots, and returns the event that records it. It returns ErrCancelled if a control stops
// the execution meanwhile. If the workspace cannot be filled, it terminates the sandbox and returns an *Error.
func (p *sandboxPreparation) restoreWorkspace(ctx context.Context, box sandbox.Sandbox, from []contents.RestoreSource) (events.WorkspaceRestored, error) {
	l := p.Session
	var restored events.WorkspaceRestored
	err := p.unlessCancelled(ctx, func(ctx context.Context) (err error) {
		if restored, err = p.Contents.RestoreWorkspace(ctx, l, box, from); err != nil {
			err = p.endFailedSandbox(ctx, box.ID(), err)
		}
		return err
	}, nil, nil)
	return restored, err
}

// writeAgentFiles writes the files of the agent's definition into the workspace, and returns the event that records it. If that fails, it
// terminates the sandbox and returns an *Error.
func (p *sandboxPreparation) writeAgentFiles(ctx context.Context, box sandbox.Sandbox) (events.Payload, error) {
	written, err := p.Contents.WriteDefinitionFiles(ctx, box, p.Resolved.Definition.Files)
	if err != nil {
		return nil, p.endFailedSandbox(ctx, box.ID(), err)
	}
	return written, nil
}

// codeTranscriptLost is the code of an execution that failed because the transcript of the conversation that it continues is missing.
const codeTranscriptLost = "TRANSCRIPT_LOST"

// ConversationToContinue returns which conversation a new agent process has to continue, as fields of runner.Query. resume is the agent's
// own id of the conversation, or "" for a new one. If fork is not nil, the agent continues a copy: of the conversation that the session was
// forked from, cut after fork.Anchor, or of the transcript with which the session began.
func ConversationToContinue(l *eventlog.SessionState) (resume string, fork *runner.Fork) {
	if own := l.Run.AgentSession; own != "" {
		return own, nil
	}
	if f := l.Life.Fork; f != nil && f.AgentSessionID != "" {
		return f.AgentSessionID, &runner.Fork{Anchor: f.Anchor}
	}
	if p := l.Life.Transcript; p != nil {
		return p.AgentSessionID, &runner.Fork{Provided: true}
	}
	return "", nil
}

// HasConversation reports whether the session had a conversation before its current execution. Without one, nothing is lost if the agent
// cannot continue what an earlier attempt of the execution has begun.
func HasConversation(l *eventlog.SessionState) bool {
	return l.Run.Continues != "" || l.Life.Fork != nil && l.Life.Fork.AgentSessionID != "" || l.Life.Transcript != nil
}
