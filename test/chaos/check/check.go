// Package check decides whether the answers that clients received agree with the log. It has no side effects, so
// tests can run it on falsified evidence.
package check

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Event is a stored event, as read from the log or as a client received it.
type Event struct {
	Seq         uint32
	ID          string
	Type        events.Type
	ExecutionID string
	Data        string // its data as JSON, or a digest of it; equal on both sides
}

// Stream holds the events that one client received of a session, over all its connections.
type Stream struct {
	Client  string // names the client in messages
	Session string
	Events  []Event
	Pieces  []Piece // text in flight
}

// Evidence holds what clients received, and what the log contains, during a chaos run. Check compares the two.
type Evidence struct {
	// Accepted holds the session of each execution whose acceptance a client was told.
	Accepted map[string]string
	// Log holds the events of each session, in stream order.
	Log map[string][]Event
	// Texts holds the texts of the blocks that the log completes, by block.
	Texts   map[string]string
	Streams []Stream
}

// Check returns a description of each violation, or nil if all of the following hold:
//   - each accepted query is accepted once in the log, and has one end;
//   - the log has no query of which no client was told;
//   - seq counts 1, 2, 3, … in the log, and no event occurs twice;
//   - each client has every event of its session, once and in order;
//   - the text in flight that a client received is a prefix of the final text in the log.
func Check(e Evidence) []string {
	var wrong []string
	fail := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	accepted, ends := map[string]int{}, map[string][]events.Type{}
	for _, session := range slices.Sorted(maps.Keys(e.Log)) {
		ids := map[string]bool{}
		for i, ev := range e.Log[session] {
			if want := uint32(i) + 1; ev.Seq != want {
				fail("log of %s: seq %d instead of %d", session, ev.Seq, want)
			}
			if ids[ev.ID] {
				fail("log of %s: event %s occurs twice", session, ev.ID)
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

// compare describes the first difference between the events of a client and of the log. It returns nil if they are
// equal.
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
