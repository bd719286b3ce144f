package events

import (
	"strconv"
	"time"
)

// Meta is what every decision is given from outside: who asked, and when. The
// ids of the events that follow derive from the command's, so that deciding
// again decides the same.
type Meta struct {
	CommandID string    // cmd_…, or any id that is unique to the cause
	Now       time.Time // of the events that follow
}

// Mint makes server events with ids derived from a command, in order.
type Mint struct {
	meta Meta
	n    int
	out  []Event
}

// NewMint starts a list for one command.
func NewMint(m Meta) *Mint { return &Mint{meta: m} }

// Add appends an event about an execution ("" for the session).
func (m *Mint) Add(execution string, data Payload) {
	m.out = append(m.out, Event{
		ID:          Derive(KindEvent, m.meta.CommandID, strconv.Itoa(m.n)),
		Time:        m.meta.Now,
		ExecutionID: execution,
		Source:      FromServer,
		Data:        data,
	})
	m.n++
}

// Keep appends an event that has its id already.
func (m *Mint) Keep(e Event) { m.out = append(m.out, e) }

// Events gives the list.
func (m *Mint) Events() []Event { return m.out }
