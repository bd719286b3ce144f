package runner

import (
	"bytes"
	"encoding/json"
	"math"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/compact"
)

// DecodeMessage decodes a line that the runner sent. The result is that of encoding/json, also for lines that no runner
// of Spool writes. It does not share memory with raw.
func DecodeMessage(raw []byte) (Message, error) {
	if l, ok := decodeLine(raw); ok {
		return Message{Line: l}, nil
	}
	var m Message
	err := json.Unmarshal(raw, &m)
	return m, err
}

// decodeLine decodes a journal line in the exact form in which the runner writes it. It accepts nothing that
// encoding/json would decode to other values; the fuzz test compares them.
func decodeLine(raw []byte) (*JournalLine, bool) {
	r := compact.NewReader(raw)
	if !r.SkipOptional(`{"line":`) {
		return nil, false
	}
	var l JournalLine
	r.Expect(`{"n":`)
	l.N = r.Uint(math.MaxUint64)
	r.Expect(`,"type":`)
	l.Type = events.Type(r.String())
	r.Expect(`,"time":`)
	l.Time = r.Time()
	l.ExecutionID = r.OptionalString(`,"executionId":`)
	l.ConversationID = r.OptionalString(`,"conversationId":`)
	r.Expect(`,"data":`)
	data := r.Raw()
	if r.Expect(`}}`); !r.AtEnd() {
		return nil, false
	}
	l.Data = bytes.Clone(data)
	return &l, true
}

// DecodeDelta decodes the data of a text_delta line. The result is that of encoding/json.
func DecodeDelta(data []byte) (d TextDelta, err error) {
	r := compact.NewReader(data)
	r.Expect(`{"blockId":`)
	d.BlockID = r.String()
	r.Expect(`,"offset":`)
	d.Offset = uint32(r.Uint(math.MaxUint32)) //nolint:gosec // limited
	r.Expect(`,"delta":`)
	d.Delta = r.String()
	if r.Expect(`}`); r.AtEnd() {
		return d, nil
	}
	d = TextDelta{}
	err = json.Unmarshal(data, &d)
	return d, err
}
