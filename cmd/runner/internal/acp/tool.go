package acp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/visible"
)

// callKey identifies a call. The ids of calls are unique only in a conversation.
type callKey struct{ conversation, id string }

// runningCall is a tool call that has not ended, with the blocks of the journal that show it.
type runningCall struct {
	ToolCall
	flow    *conversation
	status  sdk.ToolCallStatus
	content []callContent
	started time.Time

	use    string // the open tool_use block
	stated bool   // journalToolUse is finished
	result string // the open tool_result block
	shown  string // its text so far
	over   bool
	uses   int // number of calls with the agent's id in the turn so far; 1 for the first

	subagent *conversation // of the sub-agent that the call runs, if it runs one
	sub      string        // the subagent block
	done     bool          // sub is finished
}

// mergeUpdate returns a copy of the call in which the fields of an update replace the earlier values.
func (c ToolCall) mergeUpdate(u toolUpdate) ToolCall {
	if u.Title != nil {
		if c.Name == "" {
			c.Name = *u.Title
		}
		c.Title = *u.Title
	}
	if u.Kind != nil && c.Kind == "" {
		c.Kind = *u.Kind
	}
	if hasValue(u.RawInput) {
		c.Input = bytes.Clone(u.RawInput)
	}
	if hasValue(u.RawOutput) {
		c.Output = bytes.Clone(u.RawOutput)
	}
	paths := append([]string(nil), c.Paths...)
	add := func(p string) {
		for _, known := range paths {
			if known == p {
				return
			}
		}
		if p != "" {
			paths = append(paths, p)
		}
	}
	for _, l := range u.Locations {
		add(l.Path)
	}
	for _, made := range u.Content {
		add(made.Path)
	}
	c.Paths = paths
	return c
}

// callInfo returns the dialect's ToolInfo for a call, or one with the protocol's tool kind if the dialect has none.
func (s *session) callInfo(c ToolCall) ToolInfo {
	if s.d.Tool != nil {
		if known := s.d.Tool(c); known != nil {
			return *known
		}
	}
	return toolInfoForKind(c.Kind)
}

// isReusedBy reports whether an update is about another call with the id of this call, which has ended. begins reports whether the update is a
// tool_call. Some agents repeat the updates of a call.
func (c *runningCall) isReusedBy(u toolUpdate, begins bool) bool {
	switch ends := u.Status != nil && isEndStatus(*u.Status); {
	case !c.over || ends && !begins:
		return false
	case hasValue(u.RawInput):
		var earlier, later any
		return json.Unmarshal(c.Input, &earlier) != nil || json.Unmarshal(u.RawInput, &later) != nil || !reflect.DeepEqual(earlier, later)
	}
	return begins && u.Title != nil && *u.Title != c.Name && *u.Title != c.Title
}

// isEndStatus reports whether a call with the status has ended.
func isEndStatus(s sdk.ToolCallStatus) bool {
	return s == sdk.ToolCallStatusCompleted || s == sdk.ToolCallStatusFailed
}

// handleToolUpdate journals a tool_call or a tool_call_update of the conversation f: the call once its input is known, its output as it grows, and
// its result. begins reports whether it is a tool_call.
func (s *session) handleToolUpdate(f *conversation, u toolUpdate, begins bool, t *agent.Turn) error {
	key := callKey{f.conv, u.ID}
	c := s.calls[key]
	id, uses := u.ID, 1
	if c != nil && c.isReusedBy(u, begins) {
		uses = c.uses + 1
		id, c = fmt.Sprintf("%s_%d", u.ID, uses), nil
	}
	if c == nil {
		f.completeText(t, "")
		f.answer.End()
		s.shown = true
		c = &runningCall{ToolCall: ToolCall{ID: id}, flow: f, subagent: f.newSubagent(id), status: sdk.ToolCallStatusPending, started: s.now(), uses: uses}
		s.calls[key] = c
		if err := s.repeatStopRequest(); err != nil {
			return err
		}
	}
	if c.over {
		return nil // some agents repeat the end of a call
	}
	c.ToolCall = c.mergeUpdate(u)
	if u.Content != nil {
		c.content = u.Content
	}
	if u.Status != nil {
		c.status = *u.Status
	}
	c.over = isEndStatus(c.status)
	if c.over {
		s.withdrawRequests(key, t)
	}
	tool := s.callInfo(c.ToolCall)
	if tool.Subagent != nil {
		s.journalSubagent(c, *tool.Subagent, t)
		return nil
	}
	s.journalToolUse(c, tool, t)
	switch {
	case c.over:
		s.journalResult(c, tool, t)
		if c.status == sdk.ToolCallStatusCompleted {
			s.journalEffects(c, tool, t)
		}
	case c.stated:
		s.appendOutput(c, t)
	}
	return nil
}

// journalToolUse opens the tool_use block of a call, and finishes the block once the input is known.
func (s *session) journalToolUse(c *runningCall, tool ToolInfo, t *agent.Turn) {
	if c.use == "" {
		name := cmp.Or(tool.Name, c.Name)
		c.use = t.OpenBlock(c.flow.conv, events.Block{Kind: events.KindToolUse, ToolName: name, ToolUseID: c.ID, DisplayName: name})
	}
	if c.stated || !c.over && (c.status != sdk.ToolCallStatusInProgress || !hasValue(c.Input)) {
		return
	}
	s.completeToolUse(c, events.StatusComplete, t)
}

// completeToolUse finishes the tool_use block of a call.
func (s *session) completeToolUse(c *runningCall, status events.BlockStatus, t *agent.Turn) {
	c.stated = true
	t.CompleteBlock(c.use, func(b *events.Block) {
		b.Input, b.Description, b.Status = bytes.Clone(c.Input), describeCall(c.ToolCall, s.place.Workspace), status
	})
}

// appendOutput journals the output that a running call has printed since the last update. Agents repeat the whole output in every update.
func (s *session) appendOutput(c *runningCall, t *agent.Turn) {
	text := resultText(c.content, nil)
	rest, grown := strings.CutPrefix(text, c.shown)
	if !grown || rest == "" {
		return
	}
	if c.result == "" {
		c.result = t.OpenBlock(c.flow.conv, events.Block{Kind: events.KindToolResult, ToolUseID: c.ID})
	}
	t.AppendText(c.result, rest)
	c.shown = text
}

// journalResult journals the tool_result block of a call that has ended.
func (s *session) journalResult(c *runningCall, tool ToolInfo, t *agent.Turn) {
	text := resultText(c.content, c.Output)
	failed := c.status == sdk.ToolCallStatusFailed || tool.Failed
	took := millis(s.now().Sub(c.started))
	if c.result == "" {
		t.AddBlock(c.flow.conv, events.Block{Kind: events.KindToolResult, ToolUseID: c.ID, Output: text, IsError: failed, DurationMs: took})
		return
	}
	t.CompleteBlock(c.result, func(b *events.Block) { b.Output, b.IsError, b.DurationMs = text, failed, took })
}

// journalEffects journals the plan and the skill that a call has changed or loaded.
func (s *session) journalEffects(c *runningCall, tool ToolInfo, t *agent.Turn) {
	if tool.Plan != nil {
		t.SetPlan(c.flow.conv, *tool.Plan)
	}
	if tool.Skill != nil {
		t.AddBlock(c.flow.conv, events.Block{Kind: events.KindSkillLoad, ToolUseID: c.ID, Skill: tool.Skill})
	}
}

// journalSubagent journals a call that runs a sub-agent.
func (s *session) journalSubagent(c *runningCall, sub SubagentCall, t *agent.Turn) {
	if !hasValue(c.Input) && !c.over {
		return
	}
	s.openSubagent(c, sub, t)
	if !c.over {
		return
	}
	c.done = true
	c.subagent.completeText(t, "")
	took, failed, said := millis(s.now().Sub(c.started)), c.status == sdk.ToolCallStatusFailed, cmp.Or(sub.Said, resultText(c.content, c.Output))
	t.CompleteBlock(c.sub, func(b *events.Block) { b.Output, b.IsError, b.DurationMs = said, failed, took })
	t.Emit(c.flow.conv, events.SubagentCompleted{SubagentID: c.subagent.conv, Conversation: c.subagent.conv, IsError: failed, DurationMs: took})
}

// openSubagent opens the block of a call that runs a sub-agent, unless it is open.
func (s *session) openSubagent(c *runningCall, sub SubagentCall, t *agent.Turn) {
	if c.sub != "" {
		return
	}
	c.sub = t.OpenBlock(c.flow.conv, events.Block{
		Kind: events.KindSubagent, SubagentID: c.subagent.conv, ToolUseID: c.ID, Name: sub.Name, Input: bytes.Clone(c.Input),
	})
	t.Emit(c.flow.conv, events.SubagentSpawned{
		SubagentID: c.subagent.conv, Conversation: c.subagent.conv, ToolUseID: c.ID, Name: sub.Name, Parent: c.flow.conv, Prompt: sub.Prompt,
		Depth: c.subagent.depth,
	})
}

// ignoreAnswer is the answerHandler of a request whose answer is not needed.
func ignoreAnswer(rpcMessage, *agent.Turn) error { return nil }

// resultText returns the result of a call as text: its content if there is any, else its raw output.
func resultText(made []callContent, raw json.RawMessage) string {
	var parts []string
	for _, c := range made {
		switch c.Type {
		case "content":
			parts = append(parts, c.Content.String())
		case "diff":
			parts = append(parts, diffText(c))
		case "terminal":
			parts = append(parts, "[terminal "+c.TerminalID+"]")
		default:
			parts = append(parts, "["+c.Type+"]")
		}
	}
	if len(parts) > 0 || !hasValue(raw) {
		return strings.Join(parts, "\n")
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var known struct {
		Output string `json:"output"`
		Error  string `json:"error"`
	}
	if json.Unmarshal(raw, &known) == nil && known.Output+known.Error != "" {
		return known.Output + known.Error
	}
	return string(raw)
}

// diffText returns a change of a file, as an agent reports it, as text: the old lines with a minus sign, then the new lines with a plus sign.
func diffText(d callContent) string {
	var b strings.Builder
	name := visible.Line(d.Path)
	b.WriteString("--- " + name + "\n+++ " + name + "\n")
	mark := func(sign, text string) {
		for line := range strings.Lines(text) {
			b.WriteString(sign + strings.TrimSuffix(line, "\n") + "\n")
		}
	}
	if d.OldText != nil {
		mark("-", *d.OldText)
	}
	mark("+", d.NewText)
	return b.String()
}

// describeCall returns a one-line description of a call, with paths relative to the workspace.
func describeCall(c ToolCall, workspace string) string {
	args := transcript.ParseMembers(c.Input) // by their exact names, as the agent reads them
	var candidates []string
	for _, name := range []string{"description", "command", "pattern", "url", "query"} {
		candidates = append(candidates, transcript.ParseString(args[name]))
	}
	if c.Title != c.Name {
		candidates = append([]string{c.Title}, candidates...)
	}
	for _, what := range append(candidates, c.Paths...) {
		if what == "" {
			continue
		}
		if rel, err := filepath.Rel(workspace, what); filepath.IsAbs(what) && err == nil && filepath.IsLocal(rel) {
			what = rel
		}
		what, _, _ = strings.Cut(what, "\n")
		return what
	}
	return ""
}

// millis returns a duration in milliseconds.
func millis(d time.Duration) uint32 {
	return uint32(min(max(d.Milliseconds(), 0), 1<<32-1)) //nolint:gosec // bounded
}
