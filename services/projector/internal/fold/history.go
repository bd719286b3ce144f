package fold

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
)

// SavedSessionState is a row of session_states: the state of a session after the event Seq, as JSON.
type SavedSessionState struct {
	Tenant, Session string
	Seq             int64
	Version         int16
	JSON            string
}

const (
	// defaultStateInterval is the number of events after which a session's state is saved. To compute the state at any event,
	// at most that many events must be folded.
	defaultStateInterval = 500
	// maxStateBytes is the maximum size, in bytes, of the JSON of a SavedSessionState. A larger state, with many large
	// open blocks, is not saved; readers then fold more events, from the state that was saved before.
	maxStateBytes = 256 << 10
)

// requestSessionState requests the state of a session from Postgres if the state is not in memory and the present
// batch, with n events of the session, reaches a seq at which the state must be saved.
func (w *missingRowCollector) requestSessionState(k RowKey, n int) {
	a := w.model.sessions[k]
	if a == nil || a.session == nil || a.history != nil {
		return
	}
	if tip := a.session.row.Tip; (tip+int64(n))/w.model.stateInterval > tip/w.model.stateInterval {
		w.out.Histories = append(w.out.Histories, k)
	}
}

// putSessionStates puts the states of sessions into the model. It computes each state from the state that Postgres has,
// and the events after it.
func (m *Model) putSessionStates(asked MissingRows, p FoundRows) error {
	for _, k := range asked.Histories {
		m.sessions[k].history = &history.State{}
	}
	for _, s := range p.States {
		if err := json.Unmarshal([]byte(s.JSON), m.sessions[RowKey{s.Tenant, s.Session}].history); err != nil {
			return fmt.Errorf("decode stored state of %s at %d: %w", s.Session, s.Seq, err)
		}
	}
	for _, r := range p.Events {
		var w events.WireEvent
		if err := json.Unmarshal([]byte(r.JSON), &w); err != nil {
			return fmt.Errorf("decode stored event %d of %s: %w", r.Seq, r.Session, err)
		}
		a := m.sessions[RowKey{r.Tenant, r.Session}]
		*a.history = history.Evolve(*a.history, w.Seq, history.EventFromReadModel(w))
	}
	return nil
}

// evolveState applies an event to the session's state, if that is in memory, and saves the state if the seq of the
// event is a multiple of the interval.
func (f *batchFold) evolveState(a *sessionRows, s *Session, e events.Event) error {
	if a.history == nil {
		return nil
	}
	if f.bare {
		e.Data = events.OpaquePayload{Name: e.Type()}
	}
	*a.history = history.Evolve(*a.history, uint32(s.Tip), e)
	if s.Tip%f.model.stateInterval != 0 {
		return nil
	}
	text, err := marshalUnescaped(a.history)
	if err != nil {
		return err
	}
	if text = validText(text); len(text) <= maxStateBytes {
		f.out.States = append(f.out.States, &SavedSessionState{a.key.Tenant, a.key.ID, s.Tip, history.StateVersion, text})
	}
	return nil
}
