package fold

import (
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// wireJSON returns the same text as encoding/json for a Wire without HTML escapes. Its data is already compact JSON,
// which encoding/json would scan again for each event.
func wireJSON(w events.Wire) string {
	b := make([]byte, 0, len(w.Data)+320)
	b = strconv.AppendUint(append(b, `{"seq":`...), uint64(w.Seq), 10)
	b = field(b, "position", w.Position)
	if w.ID != "" {
		b = field(b, "id", w.ID)
	}
	b = field(b, "type", string(w.Type))
	b = append(w.Time.AppendFormat(append(b, `,"time":"`...), time.RFC3339Nano), '"')
	b = field(b, "sessionId", w.SessionID)
	if w.ExecutionID != "" {
		b = field(b, "executionId", w.ExecutionID)
	}
	if w.ConversationID != "" {
		b = field(b, "conversationId", w.ConversationID)
	}
	b = field(b, "source", string(w.Source))
	b = append(b, `,"data":`...)
	return string(append(append(b, w.Data...), '}'))
}

func field(b []byte, name, value string) []byte {
	b = append(append(append(b, ',', '"'), name...), '"', ':')
	for i := range len(value) {
		if c := value[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			// A string always encodes.
			text, _ := marshal(value)
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), value...), '"')
}
