package fold

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
)

// SavedState is a row of session_states: the state of a session after the event Seq, as JSON.
type SavedState struct {
	Tenant, Session string
	Seq             int64
	Version         int16
	JSON            string
}

const (
	// defaultStateInterval is the number of events after which a session's state is saved. To compute the state at any event,
	// at most that many events must be folded.
	defaultStateInterval = 500
	// maxState is the largest size of a SavedState's JSON in bytes. A larger state, with many large open blocks, is not
	// saved; readers then fold more events, from the state saved before.
	maxState = 256 << 10
)

// requestHistory requests the state of a session if it is not in memory and will be saved in a batch with n events of the session: it is saved at
// every seq that is a multiple of the interval.
func (w *lookup) requestHistory(k Key, n int) {
	a := w.model.sessions[k]
	if a == nil || a.session == nil || a.history != nil {
		return
	}
	if tip := a.session.row.Tip; (tip+int64(n))/w.model.stateInterval > tip/w.model.stateInterval {
		w.out.Histories = append(w.out.Histories, k)
	}
}

// putHistories puts the states of sessions into the model: the saved state of each, evolved with the events after it.
func (m *Model) putHistories(asked Missing, p Present) error {
	for _, k := range asked.Histories {
		m.sessions[k].history = &history.State{}
	}
	for _, s := range p.States {
		if err := json.Unmarshal([]byte(s.JSON), m.sessions[Key{s.Tenant, s.Session}].history); err != nil {
			return fmt.Errorf("decode stored state of %s at %d: %w", s.Session, s.Seq, err)
		}
	}
	for _, r := range p.Events {
		var w events.WireEvent
		if err := json.Unmarshal([]byte(r.JSON), &w); err != nil {
			return fmt.Errorf("decode stored event %d of %s: %w", r.Seq, r.Session, err)
		}
		a := m.sessions[Key{r.Tenant, r.Session}]
		*a.history = history.Evolve(*a.history, w.Seq, history.EventFromReadModel(w))
	}
	return nil
}

// evolveState folds an event into the session's state, if that is in memory, and saves the state when it is due.
func (f *folding) evolveState(a *aggregate, s *Session, e events.Event) error {
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
	text, err := marshal(a.history)
	if err != nil {
		return err
	}
	if text = clean(text); len(text) <= maxState {
		f.out.States = append(f.out.States, &SavedState{a.key.Tenant, a.key.ID, s.Tip, history.StateVersion, text})
	}
	return nil
}
