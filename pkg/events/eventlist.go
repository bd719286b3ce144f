package events

import (
	"strconv"
	"time"
)

// CommandMeta is the input of a decision that does not come from the state: the id of the command and the time. The ids
// of the resulting events are derived from the command's id, so that repeating a decision gives the same events.
type CommandMeta struct {
	CommandID string    // cmd_…, or any id that is unique to the cause
	Now       time.Time // the time of the resulting events
}

// EventList collects the events of a decision, in order, and derives their ids from the id of one command.
type EventList struct {
	meta CommandMeta
	n    int
	out  []Event
}

// NewEventList returns an empty EventList for one command.
func NewEventList(m CommandMeta) *EventList { return &EventList{meta: m} }

// Add appends an event about an execution, or about the session if execution is "".
func (m *EventList) Add(execution string, data Payload) {
	m.out = append(m.out, Event{
		ID:          DeriveID(KindEvent, m.meta.CommandID, strconv.Itoa(m.n)),
		Time:        m.meta.Now,
		ExecutionID: execution,
		Source:      FromServer,
		Data:        data,
	})
	m.n++
}

// AddExisting appends an event that already has an id.
func (m *EventList) AddExisting(e Event) { m.out = append(m.out, e) }

// Events returns the collected events.
func (m *EventList) Events() []Event { return m.out }
