package live

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxExecutions is the largest number of executions whose metadata a feed holds. Metadata that was dropped is read
// again from Postgres.
const maxExecutions = 16

// metadata is the application's metadata that a new event of a feed's session gets, which depends on the event's
// execution.
type metadata struct {
	session     string          // metadata of the session; "" for none
	sessionOnly *reads.Metadata // metadata of an event without an execution; nil until it is built
	executions  []execution     // in order of last use
}

// execution is the metadata that events of one execution get.
type execution struct {
	id      string
	message string          // "" for none
	shown   *reads.Metadata // metadata of the execution's events, including the session's metadata; nil until it is built
}

// observe updates the metadata from an event that sets it.
func (m *metadata) observe(e events.Event) {
	if session, ok := reads.SetsMetadata(e); ok {
		m.set(session)
	}
	if d, ok := e.Data.(events.MessageAccepted); ok {
		m.setMessage(e.ExecutionID, string(d.Metadata))
	}
}

// setStored updates the metadata from a stored event, whose metadata Postgres has.
func (m *metadata) setStored(id string, shown *reads.Metadata) {
	session, message := "", ""
	if shown != nil {
		session, message = shown.Session, shown.Message
	}
	m.set(session)
	if id != "" {
		m.setMessage(id, message)
	}
}

// set sets the metadata of the session.
func (m *metadata) set(session string) {
	if session == m.session {
		return
	}
	m.session, m.sessionOnly = session, nil
	for i := range m.executions {
		m.executions[i].shown = nil
	}
}

// setMessage sets the metadata of the message of an execution, unless it is known. It drops that of the execution that was used least recently
// if there are maxExecutions.
func (m *metadata) setMessage(id, message string) {
	if m.find(id) >= 0 {
		return // a message's metadata never changes
	}
	if len(m.executions) == maxExecutions {
		m.executions = slices.Delete(m.executions, 0, 1)
	}
	m.executions = append(m.executions, execution{id: id, message: message})
}

// find returns the index of an execution in m.executions, or -1.
func (m *metadata) find(id string) int {
	return slices.IndexFunc(m.executions, func(x execution) bool { return x.id == id })
}

// forExecution returns the metadata of an event of an execution; id is "" for an event without one. ok reports whether the
// metadata is known.
func (m *metadata) forExecution(id string) (shown *reads.Metadata, ok bool) {
	if id == "" {
		if m.sessionOnly == nil {
			m.sessionOnly = reads.NewMetadata(m.session, "")
		}
		return m.sessionOnly, true
	}
	i := m.find(id)
	if i < 0 {
		return nil, false
	}
	x := m.executions[i]
	if x.shown == nil {
		x.shown = reads.NewMetadata(m.session, x.message)
		m.executions[i] = x
	}
	if last := len(m.executions) - 1; i < last {
		copy(m.executions[i:], m.executions[i+1:])
		m.executions[last] = x
	}
	return x.shown, true
}
