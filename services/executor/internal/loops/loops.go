// Package loops detects that an agent repeats a tool call without progress, and that sub-agents start sub-agents too
// deep. It is pure: it reads the events of an execution.
package loops

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Codes of executions that this package stops.
const (
	CodeLoop      = "LOOP_DETECTED"
	CodeRecursion = "RECURSION_LIMIT"
)

const (
	// maxConversations is the maximum number of conversations of an execution that a Detector looks at. The events of
	// further conversations are ignored.
	maxConversations = 1000
	// maxNameBytes is the maximum length in bytes of a conversation's id and of a tool's name. Conversations with longer ids
	// are ignored, and longer names of tools are cut.
	maxNameBytes = 128
)

// A Finding is what the Detector has found in the events of an execution: a loop to warn about, or a reason to stop the
// execution. The zero Finding means that it has found nothing.
type Finding struct {
	Warning      *events.LoopDetected // must be stored in the log; nil for none
	Conversation string               // of the warning

	Code, Message string // the execution must be stopped with these; "" if it may go on
}

// A Detector finds repeated tool calls and deep sub-agents in the events of one execution. It keeps hashes of the last
// calls of each conversation, and not the calls themselves. It is not safe for concurrent use.
type Detector struct {
	loops         events.Loops
	maxDepth      uint32
	attempt       uint32 // number of the last attempt that has started
	conversations map[string]*callHistory
	tooDeep       string // message about the first sub-agent that is too deep; "" if none is
}

// A callHistory holds the last tool calls of the main agent or of a sub-agent, in the order in which they were made.
type callHistory struct {
	depth  uint32 // 0 for the main agent, 1 for its sub-agents, …
	calls  []toolCall
	warned bool // the log has a loop_detected event about the series with which the calls end
}

// callHash is a hash of a tool call's id, arguments or result.
type callHash [sha256.Size / 2]byte

// A toolCall is a tool call in a callHistory. Two calls are equal if they have the same key and the same result.
type toolCall struct {
	id       callHash
	tool     string
	key      callHash // of the tool and its arguments
	result   callHash
	hasKey   bool // the arguments are complete
	returned bool // the result is complete
}

// New returns a Detector for an execution of an agent, with the limits of the agent's definition or their defaults.
func New(agent events.AgentSpec) *Detector {
	return &Detector{loops: agent.Loops.WithDefaults(), maxDepth: agent.Limits.MaxSubagentDepth()}
}

// HandleEvent adds the next event of the execution to the Detector's state, and returns what the Detector has found. It
// ignores events that do not come from the runner's journal, except loop_detected.
func (d *Detector) HandleEvent(e events.Event) Finding {
	if !d.readEvent(e) {
		return Finding{}
	}
	return d.findingAbout(e.ConversationID)
}

// RestoreEvent adds an event that an earlier executor has stored to the Detector's state. After the last stored event the caller
// must act on PendingFindings.
func (d *Detector) RestoreEvent(e events.Event) { d.readEvent(e) }

// PendingFindings returns what the Detector has found in the restored events and the log does not have: the earlier executor
// may have stopped before it could act.
func (d *Detector) PendingFindings() []Finding {
	var out []Finding
	for _, id := range slices.Sorted(maps.Keys(d.conversations)) {
		if f := d.findingAbout(id); f != (Finding{}) {
			out = append(out, f)
		}
	}
	return out
}

// readEvent adds an event to the Detector's state, and reports whether the event may lead to a finding.
func (d *Detector) readEvent(e events.Event) bool {
	if _, ok := e.Data.(events.LoopDetected); ok {
		if c := d.conversations[e.ConversationID]; c != nil {
			c.warned = true
		}
		return false
	}
	if e.N == 0 {
		return false
	}
	switch p := e.Data.(type) {
	case events.ExecutionStarted:
		// A process that starts again may repeat what the one before did: the agent's retries limit that.
		if p.Attempt > d.attempt {
			d.attempt, d.conversations = p.Attempt, nil
		}
	case events.BlockStart:
		return d.readBlock(e.ConversationID, p.Block)
	case events.BlockComplete:
		return d.readBlock(e.ConversationID, p.Block)
	case events.SubagentSpawned:
		return d.readSpawn(p)
	case events.SubagentCompleted:
		if c := d.conversations[p.Conversation]; c != nil {
			c.calls, c.warned = nil, false
		}
	}
	return false
}

// readBlock adds a block of a conversation to the Detector's state, when the block is opened or complete, and reports
// whether the block may lead to a finding.
func (d *Detector) readBlock(id string, b events.Block) bool {
	if d.loops.Action == events.LoopActionNone || b.ToolUseID == "" {
		return false
	}
	switch b.Kind {
	case events.KindToolUse, events.KindSubagent, events.KindToolResult:
	default:
		return false
	}
	c := d.historyOf(id)
	if c == nil {
		return false
	}
	complete := b.Status != events.StatusPending
	switch b.Kind {
	case events.KindToolUse:
		x := c.findOrAddCall(b.ToolUseID, d.loops.Window)
		if complete {
			x.setKey(b.ToolName, b)
		}
	case events.KindSubagent: // a call and its result in one block
		x := c.findOrAddCall(b.ToolUseID, d.loops.Window)
		x.setKey("sub-agent "+b.Name, b)
		if complete {
			x.setResult(b)
		}
	case events.KindToolResult:
		i := c.callIndex(b.ToolUseID)
		if i < 0 || !complete {
			return false
		}
		c.calls[i].setResult(b)
	}
	if n, _ := c.repeatedCalls(); n < d.loops.Warn {
		c.warned = false
	}
	return true
}

// readSpawn adds the start of a sub-agent to the Detector's state, and reports whether it may lead to a finding.
func (d *Detector) readSpawn(p events.SubagentSpawned) bool {
	if p.Conversation == events.MainConversation {
		return false
	}
	depth := max(p.Depth, 1) // the runner knows the depth of sub-agents that an earlier execution has started
	if parent := d.conversations[p.Parent]; parent != nil {
		depth = max(depth, parent.depth+1)
	}
	if c := d.historyOf(p.Conversation); c != nil {
		c.depth = depth
	}
	if depth > d.maxDepth && d.tooDeep == "" {
		d.tooDeep = fmt.Sprintf("sub-agent %q was started %d levels below the agent; the limit is %d (limits.subagentDepth)", truncate.ValidText(p.Name, maxNameBytes), depth, d.maxDepth)
	}
	return d.tooDeep != ""
}

// historyOf returns the history of a conversation, or nil if the execution has more than maxConversations conversations.
func (d *Detector) historyOf(id string) *callHistory {
	c := d.conversations[id]
	if c == nil && len(d.conversations) < maxConversations && len(id) <= maxNameBytes {
		if d.conversations == nil {
			d.conversations = map[string]*callHistory{}
		}
		c = &callHistory{}
		d.conversations[id] = c
	}
	return c
}

// findingAbout returns what the Detector has found in a conversation, or about the depth of sub-agents.
func (d *Detector) findingAbout(id string) Finding {
	f := Finding{}
	if d.tooDeep != "" {
		f.Code, f.Message = CodeRecursion, d.tooDeep
	}
	c := d.conversations[id]
	if c == nil || d.loops.Action == events.LoopActionNone {
		return f
	}
	n, tool := c.repeatedCalls()
	if n >= d.loops.Warn && !c.warned {
		c.warned = true
		f.Conversation = id
		f.Warning = &events.LoopDetected{ToolName: tool, Calls: n, Limit: d.loops.Warn, StopAt: d.loops.Stop}
	}
	if d.loops.Stop > 0 && n >= d.loops.Stop && f.Code == "" {
		who := "the agent"
		if id != events.MainConversation {
			who = "a sub-agent"
		}
		f.Code = CodeLoop
		f.Message = fmt.Sprintf("%s called %s %d times in a row with the same arguments and the same result; the limit is %d (loops.stop)", who, tool, n, d.loops.Stop)
	}
	return f
}

// callIndex returns the index of the call with an id, or -1 if the history does not contain the call.
func (c *callHistory) callIndex(id string) int {
	sum := hashParts([]byte(id))
	return slices.IndexFunc(c.calls, func(x toolCall) bool { return x.id == sum })
}

// findOrAddCall returns the call with an id. If there is none, it adds the call and removes the oldest call if there are
// more than window.
func (c *callHistory) findOrAddCall(id string, window uint32) *toolCall {
	if i := c.callIndex(id); i >= 0 {
		return &c.calls[i]
	}
	if len(c.calls) >= int(window) {
		c.calls = slices.Delete(c.calls, 0, len(c.calls)-int(window)+1)
	}
	c.calls = append(c.calls, toolCall{id: hashParts([]byte(id))})
	return &c.calls[len(c.calls)-1]
}

// repeatedCalls returns the number of equal calls at the end of the history, and the name of their tool. It does not count a
// call that has no result yet. It ignores a call whose arguments are not complete.
func (c *callHistory) repeatedCalls() (n uint32, tool string) {
	var last, counted *toolCall
	for i := range slices.Backward(c.calls) {
		x := &c.calls[i]
		switch {
		case !x.hasKey:
		case last != nil && x.key != last.key:
			return n, tool
		case !x.returned:
			last = x
		case counted != nil && x.result != counted.result:
			return n, tool
		default:
			last, counted, tool = x, x, x.tool
			n++
		}
	}
	return n, tool
}

// setKey sets the name of the tool and the hash of the arguments.
func (x *toolCall) setKey(tool string, b events.Block) {
	x.tool = truncate.ValidText(tool, maxNameBytes)
	x.key, x.hasKey = hashParts([]byte(tool), canonicalJSON(b.Input)), true
}

// setResult sets the hash of the call's result.
func (x *toolCall) setResult(b events.Block) {
	failed := "0"
	if b.IsError || b.Status == events.StatusError {
		failed = "1"
	}
	x.result, x.returned = hashParts([]byte(failed), []byte(b.Output)), true
}
