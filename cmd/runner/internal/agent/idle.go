package agent

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Limits of an IdleOutput.
const (
	maxIdleEvents = 256
	maxIdleBytes  = 1 << 20
)

// IdleOutput keeps what the agent sends while no turn runs, as events for the next turn. Text,
// calls and all other blocks become log events with their content. Beyond maxIdleEvents or maxIdleBytes it only counts what it drops. The zero
// value is ready to use. It is safe for concurrent use.
type IdleOutput struct {
	mu     sync.Mutex
	kept   []events.Payload
	bytes  int // of kept
	omits  int
	flown  int // bytes of all lines since Full was last true
	blocks int
}

// Append implements Journal.
func (o *IdleOutput) Append(_ context.Context, l runner.JournalLine) {
	p := idlePayload(l)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flown += len(l.Data)
	switch {
	case p == nil:
		return
	case len(o.kept) >= maxIdleEvents || o.bytes+len(l.Data) > maxIdleBytes:
		o.omits++
		return
	}
	o.kept, o.bytes = append(o.kept, p), o.bytes+len(l.Data)
}

// Full reports whether so much was written since it last returned true that the open blocks of the turn should be ended.
func (o *IdleOutput) Full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.flown <= maxIdleBytes/2 {
		return false
	}
	o.flown = 0
	return true
}

// NewBlockID implements Journal.
func (o *IdleOutput) NewBlockID() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.blocks++
	return "idle-" + strconv.Itoa(o.blocks)
}

// Name implements Journal. No request is open between turns, so the name is part of no id.
func (o *IdleOutput) Name() string { return "idle" }

// Take returns the events and forgets them.
func (o *IdleOutput) Take() []events.Payload {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := o.kept
	if o.omits > 0 {
		list = append(list, events.Error{
			Code: "OUTPUT_CUT", Message: fmt.Sprintf("the agent sent %d events more between two turns; only the first %d are kept", o.omits, len(o.kept)),
		})
	}
	o.kept, o.bytes, o.omits = nil, 0, 0
	return list
}

// idlePayload converts a line that was written between turns to an event of the next turn. It returns nil for a line whose content comes again in a
// later line.
func idlePayload(l runner.JournalLine) events.Payload {
	note := func(what, text string) events.Payload {
		return events.Log{Level: "info", Stream: "stdout", Message: fmt.Sprintf("after the end of its turn the agent sent %s: %s", what, text)}
	}
	switch l.Type {
	case events.TextDelta, events.BlockUpdate{}.EventType():
		return nil
	}
	switch p := events.DecodePayload(l.Type, l.Data).(type) {
	case events.Log:
		return p
	case events.Error:
		return p
	case events.BlockStart:
		if p.Block.Status == events.StatusPending {
			return nil
		}
		return note(string(p.Block.Kind), blockContent(p.Block))
	case events.BlockComplete:
		return note(string(p.Block.Kind), blockContent(p.Block))
	}
	return note(string(l.Type), string(l.Data))
}

// blockContent returns the text of a block: of a message, a plan, a skill, a call or a result.
func blockContent(b events.Block) string {
	var items []string
	for _, item := range b.TodoList() {
		items = append(items, item.Content+" ("+item.Status+")")
	}
	if b.Skill != nil {
		items = append(items, b.Skill.Name)
	}
	return cmp.Or(b.Content, b.Output, b.Message, strings.Join(items, ", "), b.ToolName+" "+string(b.Input))
}
