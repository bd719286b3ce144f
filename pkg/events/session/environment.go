package session

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// decideWorkspaceCommand returns the events for a command that concerns the session's sandbox or files.
func decideWorkspaceCommand(s State, c Command, m *events.EventList) ([]events.Event, error) {
	switch c := c.(type) {
	case RequestPause:
		return decidePause(s, c, m)
	case RequestResume:
		if s.isActive(c.ExecutionID, c.ActiveEnded) && s.Pause.Wanted && s.Pause.ExecutionID == c.ExecutionID {
			m.Add(c.ExecutionID, events.ResumeRequested{Control: s.Controls + 1})
		}
	case RequestTerminate:
		addTerminate(s, c, m)
	case RequestSync:
		m.Add("", events.SyncRequested{Sync: s.Syncs + 1})
	case PutFile:
		if err := addFilePuts(s, []FileUpload{c.FileUpload}, c.Held, m); err != nil {
			return nil, err
		}
	case RemoveFile:
		if err := s.checkChangeLimit(1, c.Held); err != nil {
			return nil, err
		}
		m.Add("", events.FileRemoved{N: s.Changes + 1, Path: c.Path, Held: c.Held})
	}
	return m.Events(), nil
}

// decidePause decides a RequestPause.
func decidePause(s State, c RequestPause, m *events.EventList) ([]events.Event, error) {
	if s.queueIndex(c.ExecutionID) >= 0 {
		return nil, &Error{CodeNotRunning, "executionId", "the execution is queued and does not run yet; pause it when it runs, or cancel it"}
	}
	if s.isActive(c.ExecutionID, c.ActiveEnded) && s.Control.N == 0 && !s.ShouldBePaused(c.ExecutionID) {
		m.Add(c.ExecutionID, events.PauseRequested{Control: s.Controls + 1})
	}
	return m.Events(), nil
}

// addTerminate adds the event of a RequestTerminate.
func addTerminate(s State, c RequestTerminate, m *events.EventList) {
	if c.ExecutionID != "" && s.queueIndex(c.ExecutionID) >= 0 {
		m.Add(c.ExecutionID, events.ExecutionWithdrawn{Reason: "terminated"})
		return
	}
	target := c.ExecutionID
	if target == "" {
		target = s.Active.ExecutionID
	}
	const reason = "terminated"
	switch {
	case s.isActive(target, c.ActiveEnded):
		if s.Control.Kind != Terminate {
			m.Add(target, events.TerminateRequested{Control: s.Controls + 1, Reason: reason})
		}
	case c.ExecutionID == "" && c.HasSandbox && !s.Idle:
		m.Add("", events.TerminateRequested{Control: s.Controls + 1, Reason: reason})
	}
}

// isActive reports whether execution is the one that was dispatched and has not ended.
func (s *State) isActive(execution string, activeEnded bool) bool {
	return execution != "" && s.Active.ExecutionID == execution && s.isRunning(activeEnded)
}

// addFilePuts adds a file_put event for each file. held is the number of the last file change that a snapshot contains.
func addFilePuts(s State, files []FileUpload, held uint32, m *events.EventList) error {
	if s.Status == Closed {
		return &Error{CodeClosed, "sessionId", "the session is closed and accepts no more files; create another session"}
	}
	if err := s.checkChangeLimit(len(files), held); err != nil {
		return err
	}
	for i, f := range files {
		m.Add("", events.FilePut{
			N: s.Changes + 1 + uint32(i), Path: f.Path, Object: f.Object, Size: f.Size, SHA256: f.SHA256, Mode: f.Mode, Archive: f.Archive, Held: held, //nolint:gosec // checkChangeLimit limits the number
		})
	}
	return nil
}

// checkChangeLimit returns an error if n more file changes would exceed MaxPendingChanges. held is the number of the
// last file change that a snapshot contains.
func (s State) checkChangeLimit(n int, held uint32) error {
	if len(s.ChangesAfter(held))+n <= MaxPendingChanges {
		return nil
	}
	return &Error{CodeTooManyFiles, "", fmt.Sprintf("%d file changes of this session would wait for its next snapshot; the limit is %d: send a tar instead, or run a turn first", len(s.ChangesAfter(held))+n, MaxPendingChanges)}
}
