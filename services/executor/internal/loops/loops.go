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
	// maxName is the maximum length of a conversation's id and of a tool's name, in bytes. Longer ids are ignored, and
	// longer names are cut.
	maxName = 128
)

// A Finding is what an event shows about the execution. The zero Finding is nothing.
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
	conversations map[string]*conversation
	tooDeep       string // message about the first sub-agent that is too deep; "" if none is
}

// A conversation holds the last calls of the main agent or of a sub-agent, in the order in which they were made.
type conversation struct {
	depth  uint32 // 0 for the main agent, 1 for its sub-agents, …
	calls  []call
	warned bool // the log has a loop_detected event about the series with which the calls end
}

type hash [sha256.Size / 2]byte

// A call is a tool call. Calls are equal if they have the same key and the same result.
type call struct {
	id       hash
	tool     string
	key      hash // of the tool and its arguments
	result   hash
	hasKey   bool // the arguments are complete
	returned bool // the result is complete
}

// New returns a Detector for an execution of an agent. The zero values of the fields of the agent mean their defaults.
func New(agent events.AgentSpec) *Detector {
	return &Detector{loops: agent.Loops.WithDefaults(), maxDepth: agent.Limits.MaxSubagentDepth()}
}

// Event reads the next event of the execution and returns what it shows. Events of the runner's journal have a number;
// of other events Event only reads loop_detected.
func (d *Detector) Event(e events.Event) Finding {
	if !d.read(e) {
		return Finding{}
	}
	return d.find(e.ConversationID)
}

// Restore reads an event that an earlier executor has stored. After the last one, the caller must act on Pending.
func (d *Detector) Restore(e events.Event) { d.read(e) }

// Pending returns what the restored events show and what is not in the log: the earlier executor may have stopped
// before it could act.
func (d *Detector) Pending() []Finding {
	var out []Finding
	for _, id := range slices.Sorted(maps.Keys(d.conversations)) {
		if f := d.find(id); f != (Finding{}) {
			out = append(out, f)
		}
	}
	return out
}

// read adds an event to the state, and reports whether the event can have a finding.
func (d *Detector) read(e events.Event) bool {
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
		return d.spawn(p)
	case events.SubagentCompleted:
		if c := d.conversations[p.Conversation]; c != nil {
			c.calls, c.warned = nil, false
		}
	}
	return false
}

// readBlock reads a block as it was opened, or as it is complete.
func (d *Detector) readBlock(id string, b events.Block) bool {
	if d.loops.Action == events.LoopNone || b.ToolUseID == "" {
		return false
	}
	switch b.Kind {
	case events.KindToolUse, events.KindSubagent, events.KindToolResult:
	default:
		return false
	}
	c := d.conversation(id)
	if c == nil {
		return false
	}
	complete := b.Status != events.StatusPending
	switch b.Kind {
	case events.KindToolUse:
		x := c.call(b.ToolUseID, d.loops.Window)
		if complete {
			x.setKey(b.ToolName, b)
		}
	case events.KindSubagent: // a call and its result in one block
		x := c.call(b.ToolUseID, d.loops.Window)
		x.setKey("sub-agent "+b.Name, b)
		if complete {
			x.setResult(b)
		}
	case events.KindToolResult:
		i := c.index(b.ToolUseID)
		if i < 0 || !complete {
			return false
		}
		c.calls[i].setResult(b)
	}
	if n, _ := c.series(); n < d.loops.Warn {
		c.warned = false
	}
	return true
}

// spawn reads the start of a sub-agent.
func (d *Detector) spawn(p events.SubagentSpawned) bool {
	if p.Conversation == events.MainConversation {
		return false
	}
	depth := uint32(1)
	if parent := d.conversations[p.Parent]; parent != nil {
		depth = parent.depth + 1
	}
	if c := d.conversation(p.Conversation); c != nil {
		c.depth = depth
	}
	if depth > d.maxDepth && d.tooDeep == "" {
		d.tooDeep = fmt.Sprintf("sub-agent %q was started %d levels below the agent; the limit is %d (limits.subagentDepth)", truncate.ValidText(p.Name, maxName), depth, d.maxDepth)
	}
	return d.tooDeep != ""
}

// conversation returns the conversation with an id, nil if the execution has too many of them.
func (d *Detector) conversation(id string) *conversation {
	c := d.conversations[id]
	if c == nil && len(d.conversations) < maxConversations && len(id) <= maxName {
		if d.conversations == nil {
			d.conversations = map[string]*conversation{}
		}
		c = &conversation{}
		d.conversations[id] = c
	}
	return c
}

// find returns what the state shows, in particular about a conversation.
func (d *Detector) find(id string) Finding {
	f := Finding{}
	if d.tooDeep != "" {
		f.Code, f.Message = CodeRecursion, d.tooDeep
	}
	c := d.conversations[id]
	if c == nil || d.loops.Action == events.LoopNone {
		return f
	}
	n, tool := c.series()
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

// index returns the index of the call with an id, -1 if the window does not have it.
func (c *conversation) index(id string) int {
	sum := hashOf([]byte(id))
	return slices.IndexFunc(c.calls, func(x call) bool { return x.id == sum })
}

// call returns the call with an id. If there is none, it adds the call, and removes the oldest one beyond the window.
func (c *conversation) call(id string, window uint32) *call {
	if i := c.index(id); i >= 0 {
		return &c.calls[i]
	}
	if len(c.calls) >= int(window) {
		c.calls = slices.Delete(c.calls, 0, len(c.calls)-int(window)+1)
	}
	c.calls = append(c.calls, call{id: hashOf([]byte(id))})
	return &c.calls[len(c.calls)-1]
}

// series returns the number of equal calls with which the window ends, and their tool. A call without a result yet is
// not counted, and it ends the series only if it is another call. A call whose arguments are not complete is ignored.
func (c *conversation) series() (n uint32, tool string) {
	var last, counted *call
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

func (x *call) setKey(tool string, b events.Block) {
	x.tool = truncate.ValidText(tool, maxName)
	x.key, x.hasKey = hashOf([]byte(tool), canonical(b.Input)), true
}

func (x *call) setResult(b events.Block) {
	failed := "0"
	if b.IsError || b.Status == events.StatusError {
		failed = "1"
	}
	x.result, x.returned = hashOf([]byte(failed), []byte(b.Output)), true
}
