package reads

import (
	"context"
	"encoding/json"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Metadata is the application's metadata of an event: the session's metadata at the time when the event was appended,
// and that of the message that the event's execution processes. Events share it, and it is immutable. A nil *Metadata
// means none.
type Metadata struct {
	Session, Message string // JSON; "" for none
	member           []byte // ,"metadata":{…}
}

// NewMetadata returns the metadata with the given JSON texts, or nil if both are empty.
func NewMetadata(session, message string) *Metadata {
	if session == "" && message == "" {
		return nil
	}
	b := append(make([]byte, 0, len(session)+len(message)+40), `,"metadata":{`...)
	if session != "" {
		b = append(append(b, `"session":`...), session...)
	}
	if message != "" {
		if session != "" {
			b = append(b, ',')
		}
		b = append(append(b, `"message":`...), message...)
	}
	return &Metadata{session, message, append(b, '}')}
}

// Len returns the number of bytes that Append adds to an event.
func (m *Metadata) Len() int {
	if m == nil {
		return 0
	}
	return len(m.member)
}

// Append appends event, the JSON of an events.WireEvent, to b, with the metadata as the last member of the event. It does
// not encode the event again; the member was encoded once for all events that share the metadata.
func (m *Metadata) Append(b, event []byte) []byte {
	end := len(event) - 1
	if m == nil || end < 0 || event[end] != '}' {
		return append(b, event...)
	}
	b = append(b, event[:end]...)
	b = append(b, m.member...)
	return append(b, '}')
}

// setMetadata sets the metadata of a page of events. It reads nothing if the page is empty.
//
// An event has the metadata of the time when it was appended, so that a replay does not depend on later changes of
// the session's metadata. The log and Postgres store each change once: in the event that made it. A message's
// metadata never changes; it is stored in the row of its execution.
func (s *Store) setMetadata(ctx context.Context, tenant, session string, list []StoredEvent) error {
	if len(list) == 0 {
		return nil
	}
	executions := make([]string, len(list))
	var asked []string
	known := map[string]bool{"": true}
	for i, kept := range list {
		var w struct {
			ExecutionID string `json:"executionId"`
		}
		if err := json.Unmarshal(kept.JSON, &w); err != nil {
			return errUnreadableEvent(err)
		}
		executions[i] = w.ExecutionID
		if !known[w.ExecutionID] {
			known[w.ExecutionID] = true
			asked = append(asked, w.ExecutionID)
		}
	}
	rows, err := s.queries.EventMetadata(ctx, queries.EventMetadataParams{
		Tenant: tenant, Session: session, First: int64(list[0].Seq), Last: int64(list[len(list)-1].Seq), Executions: asked,
	})
	if err != nil {
		return err
	}
	var changes []metadataChange // ascending by seq
	messages := map[string]string{}
	found := false
	for _, r := range rows {
		switch {
		case r.Value == nil:
			found = true
		case r.Execution != nil:
			messages[*r.Execution] = *r.Value
		default:
			c, err := decodeMetadataChange(uint32(r.Seq), *r.Value)
			if err != nil {
				return err
			}
			changes = append(changes, c)
		}
	}
	if !found { // deleted since the page was read
		return s.missingSessionError(ctx, tenant, session)
	}
	type pair struct{ session, message string }
	shared := map[pair]*Metadata{}
	now := ""
	for i := range list {
		for len(changes) > 0 && changes[0].seq <= list[i].Seq {
			now, changes = changes[0].metadata, changes[1:]
		}
		p := pair{now, messages[executions[i]]}
		m, ok := shared[p]
		if !ok {
			m = NewMetadata(p.session, p.message)
			shared[p] = m
		}
		list[i].Metadata = m
	}
	return nil
}

// metadataChange is the metadata that a session has from the event seq on, until its next change.
type metadataChange struct {
	seq      uint32
	metadata string
}

// decodeMetadataChange decodes the JSON of an event that sets the session's metadata. seq is the seq of the event.
func decodeMetadataChange(seq uint32, event string) (metadataChange, error) {
	var w struct {
		Data struct {
			Metadata json.RawMessage `json:"metadata"`
		} `json:"data"`
	}
	if err := json.Unmarshal([]byte(event), &w); err != nil {
		return metadataChange{}, errUnreadableEvent(err)
	}
	return metadataChange{seq, string(w.Data.Metadata)}, nil
}

// errUnreadableEvent returns the problem for an event of the read models that cannot be decoded.
func errUnreadableEvent(err error) error {
	return problem.New(problem.Internal, "", "an event in the read models is not valid").WithCause(err)
}

// SetsMetadata returns the session's metadata that an event sets; ok is false if the event does not change it.
func SetsMetadata(e events.Event) (metadata string, ok bool) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		return string(d.Metadata), len(d.Metadata) > 0
	case events.SessionOptionsUpdated:
		return string(d.Metadata), len(d.Metadata) > 0
	}
	return "", false
}
