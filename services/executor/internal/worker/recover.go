package worker

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// continuationPrompt is the text that precedes the query of a failed execution when the agent is asked to continue it. The query follows,
// because the agent may have failed before it recorded the query.
const continuationPrompt = `Your last turn failed before it was finished. Continue it where it stopped.
Tool calls that have a result in this conversation are done: do not repeat them. A call without a result may have taken effect: check before you repeat it.
The request was:

`

// queryOf returns the content and the parts of the query for a message. For a recovery it adds continuationPrompt.
func queryOf(m events.MessageAccepted) (content string, parts []events.Part) {
	switch {
	case !m.Continue:
		return m.Content, m.Parts
	case len(m.Parts) > 0:
		return m.Content, slices.Concat([]events.Part{{Type: "text", Text: continuationPrompt}}, m.Parts)
	}
	return continuationPrompt + m.Content, nil
}
