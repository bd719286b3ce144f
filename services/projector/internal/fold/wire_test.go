package fold

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

func TestWireJSON_EqualsEncodingJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.StringN(0, 5, 5), rapid.Just("a<&>\\\"\u2028\x00é"))
		w := events.Wire{
			Seq: rapid.Uint32().Draw(t, "seq"), Position: text.Draw(t, "position"), ID: text.Draw(t, "id"), Type: events.Type(text.Draw(t, "type")),
			Time:      time.Unix(rapid.Int64Range(0, 1<<37).Draw(t, "s"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns")).UTC(),
			SessionID: text.Draw(t, "session"), ExecutionID: text.Draw(t, "execution"), ConversationID: text.Draw(t, "conversation"),
			Source: events.Source(text.Draw(t, "source")), Data: json.RawMessage(`{"a":"<&>","b":[1,null]}`),
		}
		want, err := marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		if got := wireJSON(w); got != want {
			t.Fatalf("got  %s\nwant %s", got, want)
		}
	})
}
