package builtin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// DefaultMaxSteps is the largest number of the model's answers in one turn.
const DefaultMaxSteps = 50

// Model is a language model.
type Model interface {
	// Stream passes the pieces of an answer to each and returns the complete answer. If it returns an error, the answer
	// holds what came before it.
	Stream(ctx context.Context, r model.Request, each func(model.Delta)) (model.Answer, error)
}

// Loop runs turns, one at a time.
type Loop struct {
	Model        Model
	DefaultModel string
	Tools        []tool.Tool          // the query may leave some out
	Workspace    *workspace.Workspace // for the paths of permission requests
	System       string               // the system prompt when the query has none
	Memory       string               // the memory file's content
	MaxSteps     int                  // 0 for DefaultMaxSteps
	Now          func() time.Time
	Log          *slog.Logger
}

// turn is the state of one turn.
type turn struct {
	*Loop
	query   runner.Query
	record  Record
	permits *permits
	tools   []tool.Tool
	said    *Transcript
	usage   events.Usage
	model   string
}

// Run runs one turn: it appends to the transcript, reports to the record, and runs the calls of tools that permits allows.
// Cancelling ctx interrupts the turn. A model accepts the transcript, unless ctx ended for another reason than
// errInterrupted: then the process ends, and the transcript is completed when it is opened again.
func (l *Loop) Run(ctx context.Context, q runner.Query, said *Transcript, record Record, permits *permits) runner.TurnEnd {
	t := &turn{Loop: l, query: q, record: record, permits: permits, tools: chooseTools(l.Tools, q.Tools), said: said, model: q.Model}
	if t.model == "" {
		t.model = l.DefaultModel
	}
	ended, err := t.run(ctx)
	if err != nil {
		ended = runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "INTERNAL", Message: err.Error()}
	}
	ended.Usage = t.usage
	reason := "the turn ended before the call was run"
	if ended.Outcome == runner.OutcomeInterrupted {
		if !isInterrupted(ctx) {
			return ended
		}
		reason = interruptedBeforeRun
	}
	if err := said.answerOpenCalls(reason); err != nil {
		record.Event(events.Error{Code: "INTERNAL", Message: err.Error()})
	}
	return ended
}

// run alternates between answers of the model and tool calls, until an answer has no call, ctx ends or the limit is reached. An error
// means that the transcript cannot be written.
func (t *turn) run(ctx context.Context) (runner.TurnEnd, error) {
	if err := t.said.Add(userMessage(t.query)); err != nil {
		return runner.TurnEnd{}, err
	}
	limit, raise := t.MaxSteps, "SPOOL_AGENT_MAX_STEPS raises the limit"
	switch {
	case t.query.MaxTurns > 0:
		limit, raise = int(t.query.MaxTurns), "the agent's limits.turns raises the limit"
	case limit <= 0:
		limit = DefaultMaxSteps
	}
	for range limit {
		answer, err := t.ask(ctx)
		if !answer.Message.Partial || answer.Message.Text != "" {
			if addErr := t.said.Add(answer.Message); addErr != nil {
				return runner.TurnEnd{}, addErr
			}
		}
		if err != nil {
			return t.modelErrorEnd(ctx, err), nil
		}
		if answer.Cut {
			t.record.Event(events.Error{Code: "MODEL_OUTPUT_CUT", Message: "the model's answer was cut by its token limit"})
		}
		if len(answer.Message.Calls) == 0 {
			return runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: answer.Message.Text}, nil
		}
		if err := t.runCalls(ctx, answer.Message.Calls); err != nil {
			return runner.TurnEnd{}, err
		}
		if ctx.Err() != nil {
			return interruptedEnd(), nil
		}
	}
	return runner.TurnEnd{
		Outcome: runner.OutcomeFailed, Code: "TURN_LIMIT",
		Message: fmt.Sprintf("the model was asked %d times in one turn without coming to an end; %s", limit, raise),
	}, nil
}

// userMessage returns the query as a message for the model.
func userMessage(q runner.Query) model.Message {
	m := model.Message{Role: model.User, Text: expandCommand(q.Content, q.Commands)}
	for _, p := range q.Parts {
		switch p.Type {
		case "image":
			m.Images = append(m.Images, model.URL("data:"+p.MediaType+";base64,"+p.Data))
		default:
			if m.Text != "" {
				m.Text += "\n"
			}
			m.Text += p.Text
		}
	}
	return m
}

// interruptedBeforeRun is the result of a call that was not run because the user interrupted the turn.
const interruptedBeforeRun = "interrupted by the user before the call was run"

// isInterrupted reports whether the user interrupted the turn. It returns false if the process ends.
func isInterrupted(ctx context.Context) bool { return errors.Is(context.Cause(ctx), errInterrupted) }

// interruptedEnd returns the outcome of a turn that was interrupted.
func interruptedEnd() runner.TurnEnd { return runner.TurnEnd{Outcome: runner.OutcomeInterrupted} }

// modelErrorEnd returns the outcome of a turn whose model gave no answer.
func (t *turn) modelErrorEnd(ctx context.Context, err error) runner.TurnEnd {
	if ctx.Err() != nil {
		return interruptedEnd()
	}
	var m *model.Error
	if errors.As(err, &m) {
		return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: m.Code, Message: m.Message}
	}
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: err.Error()}
}

// ask requests one answer and shows it as it comes.
func (t *turn) ask(ctx context.Context) (model.Answer, error) {
	s := &answerBlocks{turn: t, calls: map[int]*shownCall{}}
	answer, err := t.Model.Stream(ctx, model.Request{
		Model: t.model, System: t.system(), Messages: t.said.Messages(), Tools: t.toolOffers(),
	}, s.addDelta)
	s.finish(answer, err)
	t.usage.InputTokens += answer.Usage.Input
	t.usage.OutputTokens += answer.Usage.Output
	t.usage.CacheReadTokens += answer.Usage.CacheRead
	if answer.Usage != (model.Usage{}) {
		t.record.Event(events.MetadataUpdate{Usage: t.usage, Model: answer.Model})
	}
	return answer, err
}

// system returns the system prompt: the query's or the default, and the memory file.
func (t *turn) system() string {
	s := t.query.SystemPrompt
	if s == "" {
		s = t.System
	}
	if t.Memory != "" {
		s += "\n\n" + t.Memory
	}
	return s
}

// toolOffers returns the tools in the form that the model receives.
func (t *turn) toolOffers() []model.Offer {
	var out []model.Offer
	for _, tl := range t.tools {
		out = append(out, model.Offer{Name: tl.Name(), Description: tl.Description(), Schema: tl.Schema()})
	}
	return out
}

// answerBlocks shows an answer in blocks as it comes.
type answerBlocks struct {
	*turn
	thinking, text string // refs of the open blocks
	calls          map[int]*shownCall
	order          []*shownCall
}

// shownCall is the open block of a tool call: its reference, and the id of the call.
type shownCall struct{ ref, id string }

// addDelta shows a piece of the answer. It opens a block for the first piece of a kind, and completes the block before it.
func (s *answerBlocks) addDelta(d model.Delta) {
	switch {
	case d.Thinking != "":
		if s.thinking == "" {
			s.thinking = s.record.Open(events.Block{Kind: events.KindThinking})
		}
		s.record.Text(s.thinking, d.Thinking)
	case d.Text != "":
		s.stopThinking(events.Block{})
		if s.text == "" {
			s.text = s.record.Open(events.Block{Kind: events.KindAssistantText, Model: s.model})
		}
		s.record.Text(s.text, d.Text)
	case d.Call != nil:
		s.stopThinking(events.Block{})
		c := s.calls[d.Call.Index]
		if c == nil {
			s.stopText(events.Block{Model: s.model})
			c = &shownCall{id: d.Call.ID}
			c.ref = s.record.Open(events.Block{Kind: events.KindToolUse, ToolName: d.Call.Name, ToolUseID: d.Call.ID})
			s.calls[d.Call.Index] = c
			s.order = append(s.order, c)
		}
		if d.Call.Arguments != "" {
			s.record.Text(c.ref, d.Call.Arguments)
		}
	}
}

// stopThinking completes the open block of thinking, if there is one, with the fields of b.
func (s *answerBlocks) stopThinking(b events.Block) {
	if s.thinking != "" {
		s.record.Complete(s.thinking, b)
		s.thinking = ""
	}
}

// stopText completes the open block of text, if there is one, with the fields of b.
func (s *answerBlocks) stopText(b events.Block) {
	if s.text != "" {
		s.record.Complete(s.text, b)
		s.text = ""
	}
}

// finish completes the blocks that the answer opened; if err is not nil, as cut short. A transcript can be cut after a
// whole message, so only the last block has an anchor.
func (s *answerBlocks) finish(a model.Answer, err error) {
	status, last := events.StatusComplete, nextAnchor(s.said)
	if err != nil {
		status, last = events.StatusError, ""
	}
	anchorAt := func(isLast bool) string {
		if isLast {
			return last
		}
		return ""
	}
	s.stopThinking(events.Block{Status: status, Anchor: anchorAt(s.text == "" && len(s.order) == 0)})
	s.stopText(events.Block{Status: status, Model: a.Model, Anchor: anchorAt(len(s.order) == 0)})
	inputs := map[string]json.RawMessage{}
	for _, c := range a.Message.Calls {
		inputs[c.ID] = c.Arguments
	}
	for i, c := range s.order {
		s.record.Complete(c.ref, events.Block{Status: status, Input: inputs[c.id], Anchor: anchorAt(i == len(s.order)-1)})
	}
}
