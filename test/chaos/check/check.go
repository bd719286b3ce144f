// Package check decides whether what clients were told and what the log holds agree.
// It is pure, so that it is tested with evidence that was falsified on purpose.
package check

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Event is one kept event, as the log or a client has it.
type Event struct {
	Seq         uint32
	ID          string
	Type        events.Type
	ExecutionID string
	Data        string // its data as JSON, or a digest of it; equal on both sides
}

// Stream is what one client received of a session over all its connections.
type Stream struct {
	Client  string // for messages
	Session string
	Events  []Event
	Pieces  []Piece // text in flight
}

// Evidence is what a run leaves.
type Evidence struct {
	// Accepted are the queries whose acceptance was answered: session by execution.
	Accepted map[string]string
	// Log holds the events of each session, counted in stream order.
	Log map[string][]Event
	// Texts are the texts of the blocks that the log completes, by block.
	Texts   map[string]string
	Streams []Stream
}

// Check returns all that is wrong, nil if nothing is:
//   - each accepted query is accepted once in the log and ends there once;
//   - the log has no query that no client was told of;
//   - seq counts 1, 2, 3, … in the log, and no event is there twice;
//   - each client has every event of its session, once and in order;
//   - the text in flight that a client has is the beginning of what the log has in the end.
func Check(e Evidence) []string {
	var wrong []string
	fail := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	accepted, ends := map[string]int{}, map[string][]events.Type{}
	for _, session := range slices.Sorted(maps.Keys(e.Log)) {
		ids := map[string]bool{}
		for i, ev := range e.Log[session] {
			if want := uint32(i) + 1; ev.Seq != want {
				fail("log of %s: seq %d where %d is due", session, ev.Seq, want)
			}
			if ids[ev.ID] {
				fail("log of %s: event %s is there twice", session, ev.ID)
			}
			ids[ev.ID] = true
			switch {
			case ev.Type == (events.MessageAccepted{}).EventType():
				accepted[ev.ExecutionID]++
				if e.Accepted[ev.ExecutionID] != session {
					fail("log of %s: query %s was accepted, and no client was told so", session, ev.ExecutionID)
				}
			case events.Terminal(ev.Type):
				ends[ev.ExecutionID] = append(ends[ev.ExecutionID], ev.Type)
			}
		}
	}
	for _, x := range slices.Sorted(maps.Keys(e.Accepted)) {
		if accepted[x] != 1 {
			fail("query %s of %s was answered, and is accepted %d times in the log", x, e.Accepted[x], accepted[x])
		}
		if len(ends[x]) != 1 {
			fail("query %s of %s ended %d times: %v", x, e.Accepted[x], len(ends[x]), ends[x])
		}
	}
	for _, s := range e.Streams {
		for _, why := range append(compare(s.Events, e.Log[s.Session]), texts(s.Pieces, e.Texts)...) {
			fail("%s of %s: %s", s.Client, s.Session, why)
		}
	}
	return wrong
}

// compare returns the first difference between what a client has and the log, which are equal if there is none.
func compare(got, want []Event) []string {
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			return []string{fmt.Sprintf("ends after %d of %d events", len(got), len(want))}
		case i >= len(want):
			return []string{fmt.Sprintf("has %d events, the log %d", len(got), len(want))}
		case got[i] != want[i]:
			return []string{fmt.Sprintf("event %d is %+v, in the log %+v", i+1, got[i], want[i])}
		}
	}
	return nil
}
