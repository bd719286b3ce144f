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

// processOrder is a line from the runner to the agent's process: a query, an interrupt or a permission reply.
type processOrder struct {
	Op         string           `json:"op"` // query, interrupt, permission
	Query      *runner.Query    `json:"query,omitempty"`
	Permission *permissionReply `json:"permission,omitempty"`
}

// processReport is a line from the agent's process to the runner about the running turn.
type processReport struct {
	Op         string             `json:"op"` // begin, open, text, complete, event, permission, end
	Ref        string             `json:"ref,omitempty"`
	Block      *events.Block      `json:"block,omitempty"`
	Text       string             `json:"text,omitempty"`
	Type       events.Type        `json:"type,omitempty"`
	Data       json.RawMessage    `json:"data,omitempty"`
	Permission *permissionRequest `json:"permission,omitempty"`
	Ended      *runner.TurnEnd    `json:"ended,omitempty"`
}

// TurnRecorder receives the blocks and events of a turn of the built-in agent.
type TurnRecorder interface {
	// OpenBlock opens a block and returns its reference.
	OpenBlock(events.Block) (ref string)
	// AppendText appends to the text of an open block.
	AppendText(ref, piece string)
	// CompleteBlock finishes a block. The given fields are added to those with which it was opened.
	CompleteBlock(ref string, b events.Block)
	// RecordEvent records an event that is not a block.
	RecordEvent(events.Payload)
}

// reportWriter is the TurnRecorder of the agent's process: it writes reports to stdout. It keeps the first error and
// writes nothing after it, because the runner is gone then.
type reportWriter struct {
	mu   sync.Mutex
	enc  *json.Encoder
	refs int
	err  error
}

// newReportWriter returns a reportWriter that writes lines to w.
func newReportWriter(w io.Writer) *reportWriter {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return &reportWriter{enc: enc}
}

// write writes a report as one line of JSON.
func (p *reportWriter) write(r processReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = p.enc.Encode(r)
	}
}

// OpenBlock implements TurnRecorder.
func (p *reportWriter) OpenBlock(b events.Block) string {
	p.mu.Lock()
	p.refs++
	ref := "r" + strconv.Itoa(p.refs)
	p.mu.Unlock()
	p.write(processReport{Op: "open", Ref: ref, Block: &b})
	return ref
}

// AppendText implements TurnRecorder.
func (p *reportWriter) AppendText(ref, piece string) {
	p.write(processReport{Op: "text", Ref: ref, Text: piece})
}

// CompleteBlock implements TurnRecorder.
func (p *reportWriter) CompleteBlock(ref string, b events.Block) {
	p.write(processReport{Op: "complete", Ref: ref, Block: &b})
}

// RecordEvent implements TurnRecorder.
func (p *reportWriter) RecordEvent(e events.Payload) {
	raw, err := json.Marshal(e)
	if err != nil {
		raw, e = []byte(fmt.Sprintf(`{"code":"INTERNAL","message":%q}`, err.Error())), events.Error{}
	}
	p.write(processReport{Op: "event", Type: e.EventType(), Data: raw})
}

// applyTo applies a report of the agent's process to the turn t. refs maps the process's references of blocks to the
// ids of the turn's blocks.
func (r processReport) applyTo(t *agent.Turn, refs map[string]string) error {
	switch {
	case r.Op == "begin":
		clear(refs)
	case r.Op == "open" && r.Block != nil:
		refs[r.Ref] = t.OpenBlock(events.MainConversation, *r.Block)
	case r.Op == "text":
		t.AppendText(refs[r.Ref], r.Text)
	case r.Op == "complete" && r.Block != nil:
		t.CompleteBlock(refs[r.Ref], r.addFinalFields)
		delete(refs, r.Ref)
	case r.Op == "event":
		return r.emitEvent(t)
	case r.Op == "end" && r.Ended != nil:
		t.End(*r.Ended)
	default:
		return fmt.Errorf("op %q is not known, or incomplete", r.Op)
	}
	return nil
}

// addFinalFields sets the fields of b that the process knows only when the block is complete.
func (r processReport) addFinalFields(b *events.Block) {
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

// emitEvent journals the event in the report, if it has a type that an agent may report.
func (r processReport) emitEvent(t *agent.Turn) error {
	switch p := events.DecodePayload(r.Type, r.Data).(type) {
	case events.MetadataUpdate, events.TranscriptWritten, events.Error, events.Log:
		t.Emit(events.MainConversation, p)
		return nil
	}
	return fmt.Errorf("event %q: an agent must not report this type", r.Type)
}
