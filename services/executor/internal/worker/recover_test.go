package worker

import (
	"reflect"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// TestQueryOf_AsksToContinueOnlyARecoveryThatHadStarted tests that the continuation precedes content and parts alike, and that all other messages are
// sent unchanged.
func TestQueryOf_AsksToContinueOnlyARecoveryThatHadStarted(t *testing.T) {
	t.Parallel()
	image := events.Part{Type: "image", MediaType: "image/png", Data: "AA=="}
	for name, c := range map[string]struct {
		message events.MessageAccepted
		content string
		parts   []events.Part
	}{
		"message":                     {events.MessageAccepted{Content: "/do it"}, "/do it", nil},
		"recovery that had not begun": {events.MessageAccepted{Content: "/do it", RecoveredFrom: "exe_1"}, "/do it", nil},
		"recovery of content":         {events.MessageAccepted{Content: "do it", RecoveredFrom: "exe_1", Continue: true}, continuationPrompt + "do it", nil},
		"recovery of parts, an image": {events.MessageAccepted{Parts: []events.Part{image}, RecoveredFrom: "exe_1", Continue: true}, "", []events.Part{{Type: "text", Text: continuationPrompt}, image}},
		"message of parts, not begun": {events.MessageAccepted{Parts: []events.Part{image}}, "", []events.Part{image}},
	} {
		content, parts := queryOf(c.message)
		if content != c.content || !reflect.DeepEqual(parts, c.parts) {
			t.Errorf("%s: asked %q with %+v", name, content, parts)
		}
	}
}
