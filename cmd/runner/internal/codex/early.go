package codex

import (
	"bytes"
	"maps"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// maxEarly bounds what is kept of threads that nobody has told of, in notifications.
const maxEarly = 10_000

// early is a notification about a thread that is not known yet.
type early struct {
	line line
	raw  []byte
}

// early keeps what the CLI tells of a sub-agent before it tells that there is
// one: it orders what it says of one thread, not of two. So too of one that an earlier turn had. Without its turn the
// sub-agent could not be stopped, nor would its commands be.
func (s *session) early(l line, n notification, raw []byte) bool {
	_, stopping := s.stopping[n.ThreadID]
	if !s.pending || n.ThreadID == "" || n.ThreadID == s.thread || stopping || s.turn.conversations[n.ThreadID] != nil || s.turn.kept >= maxEarly {
		return false
	}
	// A turn's begin is the first of it; what comes without one is the end of something older.
	if l.Method != "turn/started" && (s.turn.early[n.ThreadID] == nil || slices.Contains(silent, l.Method)) {
		return false
	}
	if s.turn.early == nil {
		s.turn.early = map[string][]early{}
	}
	s.turn.early[n.ThreadID] = append(s.turn.early[n.ThreadID], early{l, bytes.Clone(raw)})
	s.turn.kept++
	return true
}

// catchUp takes what was kept of threads that are known by now.
func (s *session) catchUp(t *agent.Turn) error {
	for _, thread := range slices.Sorted(maps.Keys(s.turn.early)) {
		if s.turn.conversations[thread] == nil {
			continue
		}
		list := s.turn.early[thread]
		delete(s.turn.early, thread)
		for _, e := range list {
			if err := s.notified(e.line, e.raw, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// leftover logs what came of threads that the turn never told of.
func (s *session) leftover(kept map[string][]early, t *agent.Turn) error {
	for _, thread := range slices.Sorted(maps.Keys(kept)) {
		for _, e := range kept[thread] {
			if err := s.notified(e.line, e.raw, t); err != nil {
				return err
			}
		}
	}
	return nil
}
