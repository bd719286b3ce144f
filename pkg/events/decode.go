package events

import (
	"bytes"
	"math"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// Commits that this build's Encode has written are decoded by this code, without reflection. It accepts nothing that
// encoding/json would decode to other values; the fuzz tests compare them. The caller decodes everything else with
// encoding/json.

// decodeCompactCommit decodes a commit in the form that Commit.Encode writes. If ok is false, b has another form and
// the result is not valid.
func decodeCompactCommit(b []byte) (c Commit, ok bool) {
	r := compact.NewReader(b)
	r.Expect(`{"v":`)
	c.V = int(r.Uint(math.MaxInt32))
	r.Expect(`,"id":`)
	c.ID = r.String()
	r.Expect(`,"actor":{"kind":`)
	c.Actor.Kind = r.String()
	c.Actor.ID = r.OptionalString(`,"id":`)
	c.Actor.Key = r.OptionalString(`,"key":`)
	c.Actor.User = r.OptionalString(`,"user":`)
	c.Actor.Service = r.OptionalString(`,"service":`)
	c.Actor.Address = r.OptionalString(`,"address":`)
	r.Expect(`}`)
	if r.SkipOptional(`,"epoch":`) {
		c.Epoch = r.Uint(math.MaxUint64)
	}
	r.Expect(`,"prev":`)
	c.Prev = r.String()
	r.Expect(`,"hash":`)
	c.Hash = r.String()
	r.Expect(`,"events":`)
	events := r.Raw()
	var state []byte
	if r.SkipOptional(`,"state":`) {
		state = r.Raw()
	}
	c.Command = r.OptionalString(`,"command":`)
	if r.Expect(`}`); !r.AtEnd() {
		return Commit{}, false
	}
	c.Events, c.State = bytes.Clone(events), bytes.Clone(state) // like those of encoding/json, they do not share memory with b
	return c, true
}

// decodeCompactEvents decodes a list of events in the form that marshalEvents writes. If ok is false, b has another
// form and the result is not valid.
func decodeCompactEvents(b []byte) (list []Event, ok bool) {
	r := compact.NewReader(b)
	for first := true; first || r.SkipOptional(`,`); first = false {
		if first {
			r.Expect(`[`)
		}
		var e Event
		r.Expect(`{"id":`)
		e.ID = r.String()
		r.Expect(`,"type":`)
		t := Type(r.String())
		r.Expect(`,"time":`)
		e.Time = r.Time()
		e.ExecutionID = r.OptionalString(`,"executionId":`)
		e.ConversationID = r.OptionalString(`,"conversationId":`)
		r.Expect(`,"source":`)
		e.Source = Source(r.String())
		if r.SkipOptional(`,"n":`) {
			e.N = r.Uint(math.MaxUint64)
		}
		r.Expect(`,"data":`)
		data := r.Raw()
		if r.Expect(`}`); r.Failed() {
			return nil, false
		}
		e.Data = DecodePayload(t, data)
		list = append(list, e)
	}
	r.Expect(`]`)
	return list, r.AtEnd()
}
