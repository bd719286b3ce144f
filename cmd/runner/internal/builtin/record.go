package builtin

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"sync"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// The agent's process and its adapter speak JSON lines that say what is to be
// called on the turn, one call a line. Before the process runs a tool, it
// sends a permission request and waits for the reply; see permissionReply.

// order is a line to the agent's process.
type order struct {
	Op         string           `json:"op"` // query, interrupt, permission
	Query      *runner.Query    `json:"query,omitempty"`
	Permission *permissionReply `json:"permission,omitempty"`
}

// report is a line from the agent's process.
type report struct {
	Op         string             `json:"op"` // begin, open, text, complete, event, permission, end
	Ref        string             `json:"ref,omitempty"`
	Block      *events.Block      `json:"block,omitempty"`
	Text       string             `json:"text,omitempty"`
	Type       events.Type        `json:"type,omitempty"`
	Data       json.RawMessage    `json:"data,omitempty"`
	Permission *permissionRequest `json:"permission,omitempty"`
	Ended      *runner.TurnEnd    `json:"ended,omitempty"`
}

// Record receives what the loop does.
type Record interface {
	// Open opens a block and returns its reference.
	Open(events.Block) (ref string)
	// Text appends to the text of an open block.
	Text(ref, piece string)
	// Complete finishes a block. The given fields are added to those with which it was opened.
	Complete(ref string, b events.Block)
	// Event records an event that is not a block.
	Event(events.Payload)
}

// pipe is the Record of the agent's process: it writes lines to stdout. It keeps the first error, after which it writes
// nothing, because the runner is gone.
type pipe struct {
	mu   sync.Mutex
	enc  *json.Encoder
	refs int
	err  error
}

func newPipe(w io.Writer) *pipe {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return &pipe{enc: enc}
}

// write writes a report as a line.
func (p *pipe) write(r report) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = p.enc.Encode(r)
	}
}

func (p *pipe) Open(b events.Block) string {
	p.mu.Lock()
	p.refs++
	ref := "r" + strconv.Itoa(p.refs)
	p.mu.Unlock()
	p.write(report{Op: "open", Ref: ref, Block: &b})
	return ref
}

func (p *pipe) Text(ref, piece string) { p.write(report{Op: "text", Ref: ref, Text: piece}) }
func (p *pipe) Complete(ref string, b events.Block) {
	p.write(report{Op: "complete", Ref: ref, Block: &b})
}

func (p *pipe) Event(e events.Payload) {
	raw, err := json.Marshal(e)
	if err != nil {
		raw, e = []byte(fmt.Sprintf(`{"code":"INTERNAL","message":%q}`, err.Error())), events.Error{}
	}
	p.write(report{Op: "event", Type: e.EventType(), Data: raw})
}

// apply applies a report to the turn. refs maps the process's references of blocks to those of the turn.
func (r report) apply(t *agent.Turn, refs map[string]string) error {
	switch {
	case r.Op == "begin":
		clear(refs)
	case r.Op == "open" && r.Block != nil:
		refs[r.Ref] = t.Open(events.MainConversation, *r.Block)
	case r.Op == "text":
		t.Text(refs[r.Ref], r.Text)
	case r.Op == "complete" && r.Block != nil:
		t.Complete(refs[r.Ref], r.finish)
		delete(refs, r.Ref)
	case r.Op == "event":
		return r.emit(t)
	case r.Op == "end" && r.Ended != nil:
		t.End(*r.Ended)
	default:
		return fmt.Errorf("op %q is not known, or incomplete", r.Op)
	}
	return nil
}

// finish adds the fields that the process knows at the end.
func (r report) finish(b *events.Block) {
	if r.Block.Status == events.StatusError {
		b.Status = events.StatusError
	}
	b.IsError, b.DurationMs, b.Anchor = r.Block.IsError, r.Block.DurationMs, r.Block.Anchor
	if len(r.Block.Input) > 0 {
		b.Input = r.Block.Input
	}
	if r.Block.Output != "" {
		b.Output = r.Block.Output
	}
	if r.Block.Model != "" {
		b.Model = r.Block.Model
	}
}

// emit emits an event of a type that an agent may report.
func (r report) emit(t *agent.Turn) error {
	switch p := events.DecodePayload(r.Type, r.Data).(type) {
	case events.MetadataUpdate, events.TranscriptWritten, events.Error, events.Log:
		t.Emit(events.MainConversation, p)
		return nil
	}
	return fmt.Errorf("event %q: an agent must not report this type", r.Type)
}
