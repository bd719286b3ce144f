// Package check decides whether the answers that clients received agree with the log. It has no side effects, so
// tests can run it on falsified records.
package check

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Event is an event of a session, as read from the log or as received by a client.
type Event struct {
	Seq         uint32
	ID          string
	Type        events.Type
	ExecutionID string
	Data        string // its data as JSON, or a digest of it; equal on both sides
}

// ClientRecord holds the events and the text that one client received of a session, over all its connections.
type ClientRecord struct {
	Client  string // names the client in messages
	Session string
	Events  []Event
	Pieces  []TextPiece // text in flight
}

// Observations is the input of CompareWithLog: what the clients received during a run of the chaos test, and what the log
// contains at its end.
type Observations struct {
	// Accepted holds the session of each execution whose acceptance a client was told.
	Accepted map[string]string
	// Log holds the events of each session, in stream order.
	Log map[string][]Event
	// Texts holds the texts of the blocks that the log completes, by block.
	Texts   map[string]string
	Streams []ClientRecord
}

// CompareWithLog compares what clients received with the log. It returns a description of each violation, or nil if all of the
// following hold:
//   - each query that a client posted and the gateway accepted is accepted once in the log, and has one end;
//   - the gateway has told a client of each query in the log;
//   - the seqs of a session are 1, 2, 3, … in the log, and no event occurs twice;
//   - each client has received every event of its session, once and in order;
//   - the text in flight that a client received is a prefix of the final text in the log.
func CompareWithLog(e Observations) []string {
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
			case events.IsTerminal(ev.Type):
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
		for _, why := range append(compareEvents(s.Events, e.Log[s.Session]), checkTextPieces(s.Pieces, e.Texts)...) {
			fail("%s of %s: %s", s.Client, s.Session, why)
		}
	}
	return wrong
}

// compareEvents describes the first difference between the events that a client received (got) and the events in the
// log (want). It returns nil if they are equal.
func compareEvents(got, want []Event) []string {
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
