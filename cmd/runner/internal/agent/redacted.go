package agent

import (
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// The Turn redacts before it cuts, because half of a secret would not be recognised. So no Session cuts texts.
const (
	// maxLogMessage is the maximum size in bytes of the message of a log event.
	maxLogMessage = 16 << 10
	// maxDescription is the maximum size in bytes of the one-line description of a tool call.
	maxDescription = 200
	// maxAnchor is the maximum size in bytes of an anchor, the agent's own position after a block.
	maxAnchor = 256
)

// unredactedFields are the names of the fields of events that are not redacted, because the runner and not the agent
// determines their values.
var unredactedFields = []string{"ID", "BlockID", "ExecutionID", "Code", "Level", "Stream", "Decision", "Rule", "Watchdog", "Action", "Policy"}

// RedactPayload returns data, the payload of a journal line, with all secrets in s replaced. Text deltas are returned
// unchanged, because their text was redacted before. So are the agent's own session id and the path of its transcript,
// because the executor needs them to find the conversation.
func RedactPayload(s *redact.Set, data any) any {
	switch data.(type) {
	case runner.TextDelta, runner.TurnStart, events.TranscriptWritten:
		return data
	}
	data = redact.RedactFields(s, data, append([]string{"ConversationID", "Conversation", "Parent"}, unredactedFields...)...)
	switch d := data.(type) {
	case events.BlockStart:
		d.Block.ConversationID = redactConversation(s, d.Block.ConversationID)
		return d
	case events.BlockComplete:
		d.Block.ConversationID = redactConversation(s, d.Block.ConversationID)
		return d
	case events.SubagentSpawned:
		d.Conversation, d.Parent = redactConversation(s, d.Conversation), redactConversation(s, d.Parent)
		return d
	case events.SubagentCompleted:
		d.Conversation = redactConversation(s, d.Conversation)
		return d
	}
	return data
}

// redactConversation returns the redacted name of a conversation. The agent chooses the names of all conversations but the
// main one.
func redactConversation(s *redact.Set, name string) string {
	if name == events.MainConversation {
		return name
	}
	return s.RedactString(name)
}

// Truncate returns at most the first limit bytes of s as valid UTF-8, followed by a note with the number of bytes that
// were left out, if any.
func Truncate(s string, limit int) string {
	if len(s) > limit {
		shown := truncate.Text(s, limit)
		s = fmt.Sprintf("%s (%d bytes more)", shown, len(s)-len(shown)+len("…"))
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
