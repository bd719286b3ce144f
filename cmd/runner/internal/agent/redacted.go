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
	// maxLog is the largest size of the message of a log event, in bytes.
	maxLog = 16 << 10
	// maxDescription is the largest size of the description of a call, in bytes.
	maxDescription = 200
	// maxAnchor is the largest size of an anchor, in bytes.
	maxAnchor = 256
)

// runnerFields are the names of the fields of events that are not redacted, because the runner and not the agent
// determines their values.
var runnerFields = []string{"ID", "BlockID", "ExecutionID", "Code", "Level", "Stream", "Decision", "Rule", "Watchdog", "Action", "Policy"}

// Redacted returns data, the payload of a journal line, with all secrets in s replaced. Text deltas are returned
// unchanged, because their text was redacted before. So are the agent's own session id and the path of its transcript,
// because the executor needs them to find the conversation.
func Redacted(s *redact.Set, data any) any {
	switch data.(type) {
	case runner.TextDelta, runner.TurnStart, events.TranscriptWritten:
		return data
	}
	data = redact.Value(s, data, append([]string{"ConversationID", "Conversation", "Parent"}, runnerFields...)...)
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
	return s.String(name)
}

// Beginning returns at most the first limit bytes of s as valid UTF-8, followed by the number of bytes that were left
// out, if any.
func Beginning(s string, limit int) string {
	if len(s) > limit {
		shown := truncate.Text(s, limit)
		s = fmt.Sprintf("%s (%d bytes more)", shown, len(s)-len(shown)+len("…"))
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
