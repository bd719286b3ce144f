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

// The largest numbers of elements of a status that is sent. While a status is folded, each list also has up to MaxOpenElements open
// elements, so that the end of an element finds it.
const (
	MaxMessages     = 12
	MaxCalls        = 20
	MaxSubagents    = 20
	maxApprovals    = 20
	MaxOpenElements = 256
	maxTodos        = 50
)

// The largest sizes of texts in bytes.
const (
	maxMessageBytes = 1024
	maxTodoBytes    = 160
	maxNameBytes    = 128
	maxTextBytes    = 2048
	MaxResultBytes  = 4096
)

// trimForFolding removes the oldest elements of the lists of a status that are longer than is needed to fold further
// events.
func trimForFolding(s *spoolv1.ExecutionStatus) {
	s.Messages = keepNewest(s.Messages, MaxMessages, MaxOpenElements, messageIsOpen)
	s.ToolCalls = keepNewest(s.ToolCalls, MaxCalls, MaxOpenElements, callIsOpen)
	s.Subagents = keepNewest(s.Subagents, MaxSubagents, MaxOpenElements, subagentIsOpen)
}

// keepNewest returns list with its newest elements: up to maxEnded for which isOpen returns false, and up to maxOpen
// for which it returns true.
func keepNewest[T any](list []T, maxEnded, maxOpen int, isOpen func(T) bool) []T {
	if len(list) <= min(maxEnded, maxOpen) {
		return list
	}
	excess := map[bool]int{false: -maxEnded, true: -maxOpen}
	for _, x := range list {
		excess[isOpen(x)]++
	}
	return slices.DeleteFunc(list, func(x T) bool {
		excess[isOpen(x)]--
		return excess[isOpen(x)] >= 0
	})
}

// TrimForSending removes the elements of a status that exceed the limits of a status for clients.
func TrimForSending(s *spoolv1.ExecutionStatus) {
	s.Messages = keepOpenFirst(s.Messages, MaxMessages, messageIsOpen)
	s.ToolCalls = keepOpenFirst(s.ToolCalls, MaxCalls, callIsOpen)
	s.Subagents = keepOpenFirst(s.Subagents, MaxSubagents, subagentIsOpen)
	s.PendingApprovals = s.PendingApprovals[:min(len(s.PendingApprovals), maxApprovals)]
}

// keepOpenFirst returns list with up to limit elements. It keeps elements for which isOpen returns true before
// others, and newer ones before older ones.
func keepOpenFirst[T any](list []T, limit int, isOpen func(T) bool) []T {
	opened := 0
	for _, x := range list {
		if isOpen(x) {
			opened++
		}
	}
	return keepNewest(list, max(0, limit-opened), limit, isOpen)
}

// TruncateName returns the first maxNameBytes bytes of a name or a code.
func TruncateName(s string) string { return truncate.ValidText(s, maxNameBytes) }

// TruncateText returns the first maxTextBytes bytes of an error message.
func TruncateText(s string) string { return truncate.ValidText(s, maxTextBytes) }

// nilIfEmpty returns a pointer to s, or nil if s is empty.
func nilIfEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// NewMessage returns the status of a message, from a block of kind user_message or assistant_text.
func NewMessage(b events.Block) *spoolv1.MessageStatus {
	m := &spoolv1.MessageStatus{
		BlockId: readmodel.KeyValue(b.ID), Kind: string(b.Kind), Status: string(b.Status), ConversationId: readmodel.KeyValue(b.ConversationID), Time: wirejson.TimestampOf(b.Time),
	}
	text := b.Content
	for i := 0; text == "" && i < len(b.Parts); i++ {
		text = b.Parts[i].Text
	}
	m.Text, m.Cut = firstBytes(text, maxMessageBytes)
	return m
}

// NewApproval returns the status of an open approval request.
func NewApproval(d events.ApprovalRequested, at time.Time) *spoolv1.PendingApproval {
	return &spoolv1.PendingApproval{
		ApprovalId: readmodel.KeyValue(d.ApprovalID), Kind: TruncateName(string(d.Kind)), ToolName: TruncateName(d.ToolName), Title: TruncateName(d.Title), RequestedAt: storedTime(at),
	}
}

// SetResult sets the result of a completed execution.
func SetResult(s *spoolv1.ExecutionStatus, result string) {
	if result == "" {
		return
	}
	text, short := firstBytes(result, MaxResultBytes)
	s.Result, s.ResultCut = &text, short
}

// firstBytes returns the first limit bytes of a text, and whether the text is longer. The result does not keep the
// whole text in memory.
func firstBytes(text string, limit int) (_ string, short bool) {
	text = strings.ToValidUTF8(text, "\uFFFD")
	return strings.Clone(truncate.Prefix(text, limit)), len(text) > limit
}

// SetTodos sets the items of the plan or of the todo list of an execution's status.
func SetTodos(s *spoolv1.ExecutionStatus, items []events.TodoItem) {
	s.Todos, s.TodoCount = nil, uint32(len(items)) //nolint:gosec // a commit is smaller than 1 MB
	for _, t := range items[:min(len(items), maxTodos)] {
		s.Todos = append(s.Todos, &spoolv1.TodoItem{Content: truncate.ValidText(t.Content, maxTodoBytes), Status: truncate.ValidText(t.Status, maxNameBytes/4)})
	}
}
