package live

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxExecutions bounds the executions whose metadata a feed holds. What it no
// longer holds comes back with the next read of Postgres.
const maxExecutions = 16

// metadata is what a feed knows of the metadata that events show at its tip.
type metadata struct {
	session    string          // the session's; "" for none
	alone      *reads.Metadata // what an event of no execution shows; nil until it is made
	executions []execution     // the one used last comes last
}

// execution is one execution's metadata.
type execution struct {
	id      string
	message string          // "" for none
	shown   *reads.Metadata // with the session's; nil until it is made
}

// learn takes from an event what it sets.
func (m *metadata) learn(e events.Event) {
	if session, ok := reads.SetsMetadata(e); ok {
		m.set(session)
	}
	if d, ok := e.Data.(events.MessageAccepted); ok {
		m.know(e.ExecutionID, string(d.Metadata))
	}
}

// stored takes what an event shows, as Postgres has it.
func (m *metadata) stored(id string, shown *reads.Metadata) {
	session, message := "", ""
	if shown != nil {
		session, message = shown.Session, shown.Message
	}
	m.set(session)
	if id != "" {
		m.know(id, message)
	}
}

func (m *metadata) set(session string) {
	if session == m.session {
		return
	}
	m.session, m.alone = session, nil
	for i := range m.executions {
		m.executions[i].shown = nil
	}
}

func (m *metadata) know(id, message string) {
	if m.find(id) >= 0 {
		return // a message's metadata never changes
	}
	if len(m.executions) == maxExecutions {
		m.executions = slices.Delete(m.executions, 0, 1)
	}
	m.executions = append(m.executions, execution{id: id, message: message})
}

func (m *metadata) find(id string) int {
	return slices.IndexFunc(m.executions, func(x execution) bool { return x.id == id })
}

// of returns what an event of an execution shows, "" for one of none; ok reports whether it is known.
func (m *metadata) of(id string) (shown *reads.Metadata, ok bool) {
	if id == "" {
		if m.alone == nil {
			m.alone = reads.NewMetadata(m.session, "")
		}
		return m.alone, true
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
