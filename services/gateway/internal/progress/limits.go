package progress

import (
	"slices"
	"strings"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/truncate"
)

// The largest numbers of elements of a status that is sent. While a status is folded, each list also has up to MaxOpen open
// elements, so that the end of an element finds it.
const (
	MaxMessages  = 12
	MaxCalls     = 20
	MaxSubagents = 20
	maxApprovals = 20
	MaxOpen      = 256
	maxTodos     = 50
)

// The largest sizes of texts in bytes.
const (
	maxMessage = 1024
	maxTodo    = 160
	maxName    = 128
	maxText    = 2048
	MaxResult  = 4096
)

// limit removes the oldest elements of lists that are too long to be folded further.
func limit(s *spoolv1.ExecutionStatus) {
	s.Messages = limited(s.Messages, MaxMessages, MaxOpen, messageIsOpen)
	s.ToolCalls = limited(s.ToolCalls, MaxCalls, MaxOpen, callIsOpen)
	s.Subagents = limited(s.Subagents, MaxSubagents, MaxOpen, subagentIsOpen)
}

// limited returns list with its newest elements: up to ended that are not open, and up to opened that are.
func limited[T any](list []T, ended, opened int, open func(T) bool) []T {
	if len(list) <= min(ended, opened) {
		return list
	}
	excess := map[bool]int{false: -ended, true: -opened}
	for _, x := range list {
		excess[open(x)]++
	}
	return slices.DeleteFunc(list, func(x T) bool {
		excess[open(x)]--
		return excess[open(x)] >= 0
	})
}

// Trim removes the elements of a status that are not sent.
func Trim(s *spoolv1.ExecutionStatus) {
	s.Messages = trimmed(s.Messages, MaxMessages, messageIsOpen)
	s.ToolCalls = trimmed(s.ToolCalls, MaxCalls, callIsOpen)
	s.Subagents = trimmed(s.Subagents, MaxSubagents, subagentIsOpen)
	s.PendingApprovals = s.PendingApprovals[:min(len(s.PendingApprovals), maxApprovals)]
}

// trimmed returns list with up to limit elements: open ones before others, and newer ones before older ones.
func trimmed[T any](list []T, limit int, open func(T) bool) []T {
	opened := 0
	for _, x := range list {
		if open(x) {
			opened++
		}
	}
	return limited(list, max(0, limit-opened), limit, open)
}

// Name returns the beginning of a name or a code.
func Name(s string) string { return truncate.ValidText(s, maxName) }

// Text returns the beginning of an error message.
func Text(s string) string { return truncate.ValidText(s, maxText) }

// optional returns nil for an empty string.
func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// NewMessage returns the status of a user_message or assistant_text.
func NewMessage(b events.Block) *spoolv1.MessageStatus {
	m := &spoolv1.MessageStatus{
		BlockId: readmodel.KeyValue(b.ID), Kind: string(b.Kind), Status: string(b.Status), ConversationId: readmodel.KeyValue(b.ConversationID), Time: wirejson.TimestampOf(b.Time),
	}
	text := b.Content
	for i := 0; text == "" && i < len(b.Parts); i++ {
		text = b.Parts[i].Text
	}
	m.Text, m.Cut = cut(text, maxMessage)
	return m
}

// NewApproval returns the status of an open approval request.
func NewApproval(d events.ApprovalRequested, at time.Time) *spoolv1.PendingApproval {
	return &spoolv1.PendingApproval{
		ApprovalId: readmodel.KeyValue(d.ApprovalID), Kind: Name(string(d.Kind)), ToolName: Name(d.ToolName), Title: Name(d.Title), RequestedAt: stored(at),
	}
}

// SetResult sets the result of a completed execution.
func SetResult(s *spoolv1.ExecutionStatus, result string) {
	if result == "" {
		return
	}
	text, short := cut(result, MaxResult)
	s.Result, s.ResultCut = &text, short
}

// cut returns the first limit bytes of a text, and whether the text is longer. The result does not keep the text in memory.
func cut(text string, limit int) (_ string, short bool) {
	text = strings.ToValidUTF8(text, "\uFFFD")
	return strings.Clone(truncate.Prefix(text, limit)), len(text) > limit
}

// SetTodos sets the todo list.
func SetTodos(s *spoolv1.ExecutionStatus, items []events.TodoItem) {
	s.Todos, s.TodoCount = nil, uint32(len(items)) //nolint:gosec // a commit is smaller than 1 MB
	for _, t := range items[:min(len(items), maxTodos)] {
		s.Todos = append(s.Todos, &spoolv1.TodoItem{Content: truncate.ValidText(t.Content, maxTodo), Status: truncate.ValidText(t.Status, maxName/4)})
	}
}
