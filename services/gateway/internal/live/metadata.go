package live

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxMetadataExecutions is the largest number of executions whose metadata a feed holds. Metadata that was dropped is read
// again from Postgres.
const maxMetadataExecutions = 16

// feedMetadata holds the application's metadata that new events of a feed's session get. The metadata of an event
// depends on the execution of the event.
type feedMetadata struct {
	session     string              // metadata of the session; "" for none
	sessionOnly *reads.Metadata     // metadata of an event without an execution; nil until it is built
	executions  []executionMetadata // in order of last use
}

// executionMetadata is the application's metadata that the events of one execution get.
type executionMetadata struct {
	id      string
	message string          // "" for none
	shown   *reads.Metadata // metadata of the execution's events, including the session's metadata; nil until it is built
}

// observeEvent updates the metadata if an event sets it.
func (m *feedMetadata) observeEvent(e events.Event) {
	if session, ok := reads.SetsMetadata(e); ok {
		m.setSession(session)
	}
	if d, ok := e.Data.(events.MessageAccepted); ok {
		m.setMessage(e.ExecutionID, string(d.Metadata))
	}
}

// setFromStored updates the metadata to that of an event that was read from Postgres. id is the execution of the event.
func (m *feedMetadata) setFromStored(id string, shown *reads.Metadata) {
	session, message := "", ""
	if shown != nil {
		session, message = shown.Session, shown.Message
	}
	m.setSession(session)
	if id != "" {
		m.setMessage(id, message)
	}
}

// setSession sets the application's metadata of the session.
func (m *feedMetadata) setSession(session string) {
	if session == m.session {
		return
	}
	m.session, m.sessionOnly = session, nil
	for i := range m.executions {
		m.executions[i].shown = nil
	}
}

// setMessage sets the metadata of the message that an execution processes, unless it is known. If there are
// maxMetadataExecutions executions, it drops the one that was used least recently.
func (m *feedMetadata) setMessage(id, message string) {
	if m.indexExecution(id) >= 0 {
		return // a message's metadata never changes
	}
	if len(m.executions) == maxMetadataExecutions {
		m.executions = slices.Delete(m.executions, 0, 1)
	}
	m.executions = append(m.executions, executionMetadata{id: id, message: message})
}

// indexExecution returns the index of an execution in m.executions, or -1.
func (m *feedMetadata) indexExecution(id string) int {
	return slices.IndexFunc(m.executions, func(x executionMetadata) bool { return x.id == id })
}

// metadataOf returns the metadata of an event of an execution; id is "" for an event without one. ok reports whether the
// metadata is known.
func (m *feedMetadata) metadataOf(id string) (shown *reads.Metadata, ok bool) {
	if id == "" {
		if m.sessionOnly == nil {
			m.sessionOnly = reads.NewMetadata(m.session, "")
		}
		return m.sessionOnly, true
	}
	i := m.indexExecution(id)
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
