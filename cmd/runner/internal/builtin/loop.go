package builtin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/runner"
)

// DefaultMaxSteps is the default of the maximum number of answers of the model in one turn.
const DefaultMaxSteps = 50

// Model requests answers from a language model.
type Model interface {
	// Stream passes the pieces of an answer to each and returns the complete answer. If it returns an error, the answer
	// holds what came before it.
	Stream(ctx context.Context, r model.Request, each func(model.Delta)) (model.Answer, error)
}

// Loop runs the turns of the built-in agent, one at a time: it requests answers of the model and runs the tool calls in
// them.
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

// turn is the state of one turn of the built-in agent.
type turn struct {
	*Loop
	query   runner.Query
	record  TurnRecorder
	permits *permissionQueue
	tools   []tool.Tool
	said    *Transcript
	usage   events.Usage
	model   string
}

// Run runs one turn: it appends messages to the transcript, reports blocks and events to the record, and runs the tool
// calls that permits allows. The end of ctx interrupts the turn. After Run, every call in the transcript has a result,
// as model APIs require, unless ctx ended for another reason than errInterrupted: then the process ends, and
// openTranscript adds the missing results later.
func (l *Loop) Run(ctx context.Context, q runner.Query, said *Transcript, record TurnRecorder, permits *permissionQueue) runner.TurnEnd {
	t := &turn{Loop: l, query: q, record: record, permits: permits, tools: filterTools(l.Tools, q.Tools), said: said, model: q.Model}
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
		record.RecordEvent(events.Error{Code: "INTERNAL", Message: err.Error()})
	}
	return ended
}

// run alternates between answers of the model and tool calls, until an answer has no call, ctx ends or the maximum
// number of answers is reached. An error means that the transcript cannot be written.
func (t *turn) run(ctx context.Context) (runner.TurnEnd, error) {
	if err := t.said.AppendMessage(userMessage(t.query)); err != nil {
		return runner.TurnEnd{}, err
	}
	limit, raise := t.MaxSteps, "SPOOL_AGENT_MAX_STEPS raises the limit"
	switch {
	case t.query.MaxTurns > 0:
		limit, raise = int(t.query.MaxTurns), "the agent's limits.turns raises the limit"
	case limit <= 0:
		limit = DefaultMaxSteps
	}
	empty := false // the answer before was empty
	for range limit {
		answer, err := t.requestAnswer(ctx)
		if isKept(answer.Message) {
			if addErr := t.said.AppendMessage(answer.Message); addErr != nil {
				return runner.TurnEnd{}, addErr
			}
		}
		if err != nil {
			return t.modelErrorEnd(ctx, err), nil
		}
		if answer.Cut {
			t.record.RecordEvent(events.Error{Code: "MODEL_OUTPUT_CUT", Message: "the model's answer was cut by its token limit"})
		}
		if answer.Message.IsEmpty() {
			if empty || answer.Cut {
				return emptyAnswerEnd(answer), nil
			}
			empty = true
			t.record.RecordEvent(events.Log{Level: "warn", Message: "the model's answer has neither text nor a tool call: the request is sent once more"})
			continue
		}
		empty = false
		if len(answer.Message.Calls) == 0 {
			return runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: answer.Message.Text}, nil
		}
		if err := t.runCalls(ctx, answer); err != nil {
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

// isKept reports whether an answer becomes a part of the conversation. An empty answer does not, because model APIs refuse it; of an answer that
// was cut short, the text counts.
func isKept(m model.Message) bool {
	return !m.IsEmpty() && (!m.Partial || strings.TrimSpace(m.Text) != "")
}

// emptyAnswerEnd returns the outcome of a turn whose last answer has neither text nor a tool call.
func emptyAnswerEnd(a model.Answer) runner.TurnEnd {
	why := "the model answered with neither text nor a tool call, twice"
	if a.Cut {
		why = "the model reached its token limit before it answered with text or a tool call"
	}
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: model.CodeEmptyAnswer, Message: why}
}

// userMessage converts a query to a message for the model.
func userMessage(q runner.Query) model.Message {
	m := model.Message{Role: model.RoleUser, Text: expandCommand(q.Content, q.Commands)}
	for _, p := range q.Parts {
		switch p.Type {
		case "image":
			m.Images = append(m.Images, model.ImageURL("data:"+p.MediaType+";base64,"+p.Data))
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

// isInterrupted reports whether the user interrupted the turn. It returns false if ctx ended because the process ends.
func isInterrupted(ctx context.Context) bool { return errors.Is(context.Cause(ctx), errInterrupted) }

// interruptedEnd returns the outcome of a turn that was interrupted.
func interruptedEnd() runner.TurnEnd { return runner.TurnEnd{Outcome: runner.OutcomeInterrupted} }

// modelErrorEnd returns the outcome of a turn that ends because the model did not answer.
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

// Limits of the requests that follow an answer whose connection was lost, as in a restart of the egress proxy.
const (
	maxLostAnswers       = 4
	shortestRequestPause = 500 * time.Millisecond
	longestRequestPause  = 4 * time.Second
)

// requestAnswer requests one answer of the model. If the connection is lost within the answer, it discards the answer and sends the
// request again. The blocks of a discarded answer stay, as cut short.
func (t *turn) requestAnswer(ctx context.Context) (model.Answer, error) {
	pauses := retry.NewDoubling(shortestRequestPause, longestRequestPause)
	for lost := 0; ; lost++ {
		answer, err := t.streamAnswer(ctx)
		var m *model.Error
		if !errors.As(err, &m) || !m.Lost || lost == maxLostAnswers {
			return answer, err
		}
		t.Log.Warn("the connection to the model was lost within an answer: the request is sent again", "err", err)
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return answer, err
		}
	}
}

// streamAnswer requests one answer of the model, and shows the pieces of the answer in blocks as they arrive.
func (t *turn) streamAnswer(ctx context.Context) (model.Answer, error) {
	s := &answerBlocks{turn: t, calls: map[int]*openCallBlock{}}
	answer, err := t.Model.Stream(ctx, model.Request{
		Model: t.model, System: t.systemPrompt(), Messages: t.said.Messages(), Tools: t.toolOffers(),
	}, s.showDelta)
	s.completeAnswer(answer, err)
	t.usage.InputTokens += answer.Usage.Input
	t.usage.OutputTokens += answer.Usage.Output
	t.usage.CacheReadTokens += answer.Usage.CacheRead
	if answer.Usage != (model.Usage{}) {
		t.record.RecordEvent(events.MetadataUpdate{Usage: t.usage, Model: answer.Model})
	}
	return answer, err
}

// systemPrompt returns the system prompt for the model: the query's or the default one, followed by the memory file.
func (t *turn) systemPrompt() string {
	s := t.query.SystemPrompt
	if s == "" {
		s = t.System
	}
	if t.Memory != "" {
		s += "\n\n" + t.Memory
	}
	return s
}

// toolOffers returns the agent's tools in the form in which they are sent to the model.
func (t *turn) toolOffers() []model.ToolOffer {
	var out []model.ToolOffer
	for _, tl := range t.tools {
		out = append(out, model.ToolOffer{Name: tl.Name(), Description: tl.Description(), Schema: tl.Schema()})
	}
	return out
}

// answerBlocks opens and completes the blocks that show an answer of the model while it arrives.
type answerBlocks struct {
	*turn
	thinking, text string // refs of the open blocks
	calls          map[int]*openCallBlock
	order          []*openCallBlock
}

// openCallBlock is the open block of a tool call: ref is the reference of the block, and id that of the call.
type openCallBlock struct{ ref, id string }

// showDelta appends a piece of the answer to its block. The first piece of a kind completes the block before it and
// opens another.
func (s *answerBlocks) showDelta(d model.Delta) {
	switch {
	case d.Thinking != "":
		if s.thinking == "" {
			s.thinking = s.record.OpenBlock(events.Block{Kind: events.KindThinking})
		}
		s.record.AppendText(s.thinking, d.Thinking)
	case d.Text != "":
		s.completeThinking(events.Block{})
		if s.text == "" {
			s.text = s.record.OpenBlock(events.Block{Kind: events.KindAssistantText, Model: s.model})
		}
		s.record.AppendText(s.text, d.Text)
	case d.Call != nil:
		s.completeThinking(events.Block{})
		c := s.calls[d.Call.Index]
		if c == nil {
			s.completeText(events.Block{Model: s.model})
			c = &openCallBlock{id: d.Call.ID}
			c.ref = s.record.OpenBlock(events.Block{Kind: events.KindToolUse, ToolName: d.Call.Name, ToolUseID: d.Call.ID})
			s.calls[d.Call.Index] = c
			s.order = append(s.order, c)
		}
		if d.Call.Arguments != "" {
			s.record.AppendText(c.ref, d.Call.Arguments)
		}
	}
}

// completeThinking completes the open block of thinking, if there is one, with the fields of b.
func (s *answerBlocks) completeThinking(b events.Block) {
	if s.thinking != "" {
		s.record.CompleteBlock(s.thinking, b)
		s.thinking = ""
	}
}

// completeText completes the open block of text, if there is one, with the fields of b.
func (s *answerBlocks) completeText(b events.Block) {
	if s.text != "" {
		s.record.CompleteBlock(s.text, b)
		s.text = ""
	}
}

// completeAnswer completes all blocks that the answer opened; if err is not nil, as cut short. A transcript can be cut
// only after a whole message, so only the last block has an anchor.
func (s *answerBlocks) completeAnswer(a model.Answer, err error) {
	status, last := events.StatusComplete, nextAnchor(s.said)
	if err != nil {
		status = events.StatusError
	}
	if err != nil || !isKept(a.Message) {
		last = ""
	}
	anchorAt := func(isLast bool) string {
		if isLast {
			return last
		}
		return ""
	}
	s.completeThinking(events.Block{Status: status, Anchor: anchorAt(s.text == "" && len(s.order) == 0)})
	s.completeText(events.Block{Status: status, Model: a.Model, Anchor: anchorAt(len(s.order) == 0)})
	inputs := map[string]json.RawMessage{}
	for _, c := range a.Message.Calls {
		inputs[c.ID] = c.Arguments
	}
	for i, c := range s.order {
		s.record.CompleteBlock(c.ref, events.Block{Status: status, Input: inputs[c.id], Anchor: anchorAt(i == len(s.order)-1)})
	}
}
