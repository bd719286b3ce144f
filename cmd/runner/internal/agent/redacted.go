package agent

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// What an agent says is redacted before it is cut: half of a value would not be
// known again. So it is the Turn that cuts, and no Session.
const (
	// maxLog is how many bytes a log event keeps.
	maxLog = 16 << 10
	// maxDescription is how many bytes a call's description keeps.
	maxDescription = 200
	// maxAnchor is how many bytes an anchor may have.
	maxAnchor = 256
)

// ours are the fields in which the runner itself writes: numbers of its own, and words of its own lists.
var ours = []string{"ID", "BlockID", "ExecutionID", "Code", "Level", "Stream", "Decision", "Rule", "Watchdog", "Action", "Policy"}

// Redacted gives the data of a line without what nobody may see. Text in flight is
// redacted as it comes; an agent's own id of its session and the place of its
// record stay, since the host finds them by these.
func Redacted(s *redact.Set, data any) any {
	switch data.(type) {
	case runner.Delta, runner.Started, events.TranscriptWritten:
		return data
	}
	data = redact.Value(s, data, append([]string{"ConversationID", "Conversation", "Parent"}, ours...)...)
	switch d := data.(type) {
	case events.BlockStart:
		d.Block.ConversationID = inConversation(s, d.Block.ConversationID)
		return d
	case events.BlockComplete:
		d.Block.ConversationID = inConversation(s, d.Block.ConversationID)
		return d
	case events.SubagentSpawned:
		d.Conversation, d.Parent = inConversation(s, d.Conversation), inConversation(s, d.Parent)
		return d
	case events.SubagentCompleted:
		d.Conversation = inConversation(s, d.Conversation)
		return d
	}
	return data
}

// inConversation is the name of a conversation, which is an agent's to choose but for its own.
func inConversation(s *redact.Set, name string) string {
	if name == events.MainConversation {
		return name
	}
	return s.String(name)
}

// brief keeps the beginning of a description.
func brief(s string) string {
	if len(s) <= maxDescription {
		return s
	}
	return strings.ToValidUTF8(s[:maxDescription], "") + "…"
}

// Beginning is that of a text, as valid UTF-8, with a note if there is more.
func Beginning(s string, limit int) string {
	if len(s) > limit {
		for limit > 0 && !utf8.RuneStart(s[limit]) {
			limit--
		}
		s = fmt.Sprintf("%s… (%d bytes more)", s[:limit], len(s)-limit)
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
