package codex

import (
	"bytes"
	"maps"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// maxEarlyNotifications is the maximum number of notifications that are kept for unknown threads.
const maxEarlyNotifications = 10_000

// earlyNotification is a notification about a thread that is not known yet.
type earlyNotification struct {
	line outputLine
	raw  []byte
}

// keepEarlyNotification keeps a notification about a thread that is not known yet, and reports whether it did. The CLI orders the notifications of
// one thread, but not those of two: the first notifications of a sub-agent may arrive before the item that announces the sub-agent, also for a
// sub-agent of an earlier turn. One of these notifications has the id of the sub-agent's turn, without which the turn cannot be stopped.
func (s *session) keepEarlyNotification(l outputLine, n notification, raw []byte) bool {
	_, stopping := s.stopping[n.ThreadID]
	if !s.pending || n.ThreadID == "" || n.ThreadID == s.thread || stopping || s.turn.conversations[n.ThreadID] != nil || s.turn.kept >= maxEarlyNotifications {
		return false
	}
	// turn/started is the first notification of a turn. Notifications without one belong to the end of an older turn.
	if l.Method != "turn/started" && (s.turn.early[n.ThreadID] == nil || slices.Contains(ignoredMethods, l.Method)) {
		return false
	}
	if s.turn.early == nil {
		s.turn.early = map[string][]earlyNotification{}
	}
	s.turn.early[n.ThreadID] = append(s.turn.early[n.ThreadID], earlyNotification{l, bytes.Clone(raw)})
	s.turn.kept++
	return true
}

// handleEarlyNotifications handles the kept notifications of threads that have become known since.
func (s *session) handleEarlyNotifications(t *agent.Turn) error {
	for _, thread := range slices.Sorted(maps.Keys(s.turn.early)) {
		if s.turn.conversations[thread] == nil {
			continue
		}
		list := s.turn.early[thread]
		delete(s.turn.early, thread)
		for _, e := range list {
			if err := s.handleNotification(e.line, e.raw, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// handleUnclaimedNotifications handles, at the end of the turn, the kept notifications of threads that no item has announced. It logs them, because
// their threads are unknown, and stops turns that they report.
func (s *session) handleUnclaimedNotifications(kept map[string][]earlyNotification, t *agent.Turn) error {
	for _, thread := range slices.Sorted(maps.Keys(kept)) {
		for _, e := range kept[thread] {
			if err := s.handleNotification(e.line, e.raw, t); err != nil {
				return err
			}
		}
	}
	return nil
}
