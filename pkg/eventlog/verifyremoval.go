package eventlog

import (
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// countMissingSequences records the stream sequences that are missing before a commit.
func (v *Verifier) countMissingSequences(rec Record) {
	last := v.last[rec.Position.Shard]
	if v.whole && rec.Position.Seq > last+1 {
		if v.missing == 0 {
			v.afterGap = rec
		}
		v.missing += rec.Position.Seq - last - 1
		if before := max(last, v.proved); rec.Position.Seq > before+1 {
			v.unproved += rec.Position.Seq - before - 1
		}
	}
}

// checkRetirement checks that run_retired follows session_deleted, and that only content_removed follows run_retired. at is
// the position of the event. The counts of run_retired cannot be true if life had no commit, if more commits are left, or
// if the log had no room for so many.
func (s *sessionCheck) checkRetirement(at Position, e events.Event) string {
	switch d := e.Data.(type) {
	case events.RunRetired:
		if !s.deleted {
			return "run_retired of a session that was not deleted before"
		}
		if s.retired {
			return "the session was retired before"
		}
		s.retired, s.removable = true, uint64(d.Life)+uint64(d.Runs)
		s.before += s.commits[events.Run]
		if d.Life == 0 || s.removable < s.before || s.removable >= at.Seq {
			s.uncounted, s.removable = at, s.before
		}
		return ""
	case events.ContentRemoved:
		if !s.retired {
			return "content_removed of a session that was not retired before"
		}
		if s.uncounted != (Position{}) { // an erasure that was interrupted had removed more
			s.removable += uint64(d.Messages)
		}
		return ""
	}
	if s.retired {
		return fmt.Sprintf("%s after run_retired", e.Type())
	}
	return ""
}

// checkMissing adds to the report the problems found, with the missing commits that no deleted session explains.
func (v *Verifier) checkMissing(r *VerifyReport) {
	list := slices.Clone(v.problems)
	at := map[Position]bool{}
	for _, p := range list {
		at[p.Position] = true
	}
	var explained uint64
	suspected := false
	for _, s := range v.sessions {
		if s.retired {
			explained += s.removable - min(s.removable, s.before)
			if s.uncounted != (Position{}) {
				r.Uncounted = append(r.Uncounted, s.uncounted)
			}
			continue
		}
		suspected = suspected || len(s.suspects) > 0
		for _, p := range s.suspects {
			if !at[p.Position] { // report only one problem per commit
				list = append(list, p)
			}
		}
	}
	switch {
	case suspected || v.missing <= explained: // the positions are known, or nothing is missing
	case len(r.Uncounted) > 0:
		r.Undecided = min(v.missing-explained, v.unproved)
	default:
		list = append(list, v.newProblem(v.afterGap, fmt.Sprintf("%d sequences of the log are missing, of which deleted sessions explain %d; the first missing ones precede this commit", v.missing, explained)))
	}
	slices.SortStableFunc(list, func(a, b LogProblem) int { return a.Position.compare(b.Position) })
	slices.SortFunc(r.Uncounted, Position.compare)
	r.Problems = list[:min(len(list), maxProblems)]
}
