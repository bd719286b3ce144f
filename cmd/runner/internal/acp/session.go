package acp

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ping is a method that no agent implements. The protocol reserves the underscore for extensions, and the agent
// answers that it does not know the method, which shows that it is alive.
const ping = "_spool/ping"

// session is the agent.Session of one process.
type session struct {
	d     Dialect
	place agent.Folders
	in    agent.Stdin
	now   func() time.Time

	mu          sync.Mutex    // guards the fields below, which Interrupt shares with Line and Begin
	id          sdk.SessionId // "" until there is a session
	asking      bool          // the query was sent, and the turn has not ended
	interrupted bool          // the turn is to stop
	late        bool          // a turn was asked to stop more than once: the agent may apply the last request to the next turn
	requests    int
	waiting     map[int]handler   // requests without an answer, by id
	asked       map[string]string // the call of each permission request that is not answered, by the request's id

	// State of the process.
	caps       sdk.AgentCapabilities
	resume     string               // the session to resume
	fork       *runner.Fork         // with resume: where to cut a copy of it; nil to resume the session itself
	forked     *Forked              // the copy that the process made, once it is known
	awaitsCopy bool                 // the handshake waits for the copy
	ready      bool                 // the handshake is complete
	loading    bool                 // the agent repeats the earlier conversation
	broken     *runner.CommandError // why this process cannot take a query
	notes      []events.Payload
	instructed bool     // the instructions were sent
	comments   []string // why people rejected calls, for the next query: an answer has no field for it
	cost       float64  // of the session, as last reported

	// State of the turn.
	pending bool // a query runs
	prompt  []sdk.ContentBlock
	turnState
}

// turnState is the state of one turn.
type turnState struct {
	main   *flow
	subs   map[sdk.SessionId]*flow // sub-agents whose conversation is being repeated
	calls  map[string]*call
	todo   string // the open todo block
	shown  bool   // a message or a call was shown
	began  float64
	seen   events.Usage // the sum of the notices
	status int          // the HTTP status by which the model failed
	cut    bool         // the model's last answer reached its limit
	early  earlyText
	heard  map[string]bool   // permission requests of sub-agents that were handled, by id
	end    func(*agent.Turn) // ends the turn after the sub-agents' conversations
}

// handler handles the answer to a request of the session.
type handler func(m message, t *agent.Turn) error

// Open returns a session for a process that speaks a dialect of ACP, and sends the handshake.
func Open(d Dialect, l agent.Launch, in agent.Stdin) agent.Session {
	if d.Now == nil {
		d.Now = time.Now
	}
	if d.Shown == "" {
		d.Shown = d.Model
	}
	s := &session{d: d, place: l.Folders, in: in, now: d.Now, resume: l.Resume, fork: l.Fork, waiting: map[int]handler{}, asked: map[string]string{}, turnState: newTurn(0)}
	s.initialize()
	return s
}

// newTurn returns the state of a turn that begins when the session has cost the given dollars.
func newTurn(cost float64) turnState {
	return turnState{
		main: &flow{conv: events.MainConversation}, subs: map[sdk.SessionId]*flow{}, calls: map[string]*call{}, heard: map[string]bool{}, began: cost,
	}
}

// Begin begins a turn: it sends the query, or keeps it until the handshake is complete. The error means that the process cannot take the
// query.
func (s *session) Begin(q runner.Query, t *agent.Turn) error {
	if s.broken != nil {
		return s.broken
	}
	prompt, err := s.content(q)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.interrupted = false
	s.mu.Unlock()
	s.pending, s.prompt, s.turnState = true, prompt, newTurn(s.cost)
	for _, n := range s.notes {
		t.Emit(events.MainConversation, n)
	}
	s.notes = nil
	if !s.ready {
		return nil
	}
	// A warm agent that prints nothing is considered hung, and a model may take long to answer: the agent gets a request that
	// it answers without its model. That comes first if the agent might not answer it while it handles the query.
	if s.d.AnswersInitialize {
		if err := s.ask(t); err != nil {
			return err
		}
		return s.sendInitialize(ignoreAnswer)
	}
	if err := s.sendPing(ignoreAnswer); err != nil {
		return err
	}
	return s.ask(t)
}

// sendPing sends a request that the agent answers without its model, which shows that the agent is alive. done handles the answer.
func (s *session) sendPing(done handler) error {
	if s.caps.SessionCapabilities.List != nil {
		return s.call(sdk.AgentMethodSessionList, sdk.ListSessionsRequest{Cwd: &s.place.Workspace}, done)
	}
	return s.call(ping, struct{}{}, done)
}

// ask sends the query, with the instructions before the first query of a process. If the turn was interrupted before, it ends the turn instead.
func (s *session) ask(t *agent.Turn) error {
	s.mu.Lock()
	stopped := s.interrupted
	s.asking = !stopped
	s.mu.Unlock()
	if stopped {
		s.finish(runner.TurnEnd{Outcome: runner.OutcomeInterrupted}, t)
		return nil
	}
	prompt := s.prompt
	if s.d.Instructions != "" && !s.instructed {
		prompt = append([]sdk.ContentBlock{sdk.TextBlock("# Instructions\n" + s.d.Instructions)}, prompt...)
	}
	s.instructed = true
	for i, comment := range s.comments {
		prompt = slices.Insert(slices.Clone(prompt), i, sdk.TextBlock("<system-reminder>"+comment+"</system-reminder>"))
	}
	s.comments = nil
	return s.call(sdk.AgentMethodSessionPrompt, sdk.PromptRequest{SessionId: s.id, Prompt: prompt}, s.promptAnswered)
}

// Interrupt asks the agent to stop the turn. If the query was not sent yet, the turn ends without it.
func (s *session) Interrupt() error {
	s.mu.Lock()
	s.interrupted = true
	id, asking := s.id, s.asking
	s.mu.Unlock()
	if !asking {
		return nil // the turn ends with the handshake
	}
	err := s.requestStop(id, maxStopRequests)
	s.cancelRequests()
	return err
}

// maxStopRequests is the maximum number of times that the session repeats a request to stop a turn that goes on.
const maxStopRequests = 3

// requestStop asks the agent to stop the turn, and sends a ping after that. If the turn goes on when the agent has answered the ping, requestStop
// asks again, at most left times: an agent forgets a request that arrives before it has begun the turn.
func (s *session) requestStop(id sdk.SessionId, left int) error {
	if left < maxStopRequests {
		s.mu.Lock()
		s.late = true
		s.mu.Unlock()
	}
	if err := s.cancel(id); err != nil || left == 0 {
		return err
	}
	return s.sendPing(func(message, *agent.Turn) error {
		s.mu.Lock()
		again := s.interrupted && s.asking
		s.mu.Unlock()
		if !again {
			return nil
		}
		return s.requestStop(id, left-1)
	})
}

// cancel sends session/cancel, the protocol's request to stop a turn.
func (s *session) cancel(id sdk.SessionId) error {
	return s.in.Send(request{JSONRPC: "2.0", Method: sdk.AgentMethodSessionCancel, Params: sdk.CancelNotification{SessionId: id}})
}

// requestStopAgain asks the agent again to stop, if the turn was interrupted. It is called when the agent begins a message or a call: the
// agent may not have begun the turn when it was asked first.
func (s *session) requestStopAgain() error {
	if !s.isInterrupted() || !s.pending {
		return nil
	}
	return s.cancel(s.id)
}

func (s *session) isInterrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// call sends a request and returns at once. done is called with the answer, in the goroutine of Line.
func (s *session) call(method string, params any, done handler) error {
	s.mu.Lock()
	s.requests++
	id := s.requests
	s.waiting[id] = done
	s.mu.Unlock()
	return s.in.Send(request{JSONRPC: "2.0", ID: &id, Method: method, Params: params})
}

// Line handles a line that the agent printed.
func (s *session) Line(raw []byte, t *agent.Turn) error {
	m, err := decode[message](raw, "message")
	if err != nil {
		return err
	}
	switch {
	case m.Method != "" && len(m.ID) > 0:
		return s.handleRequest(m, t)
	case m.Method == sdk.ClientMethodSessionUpdate:
		return s.handleUpdate(m, t)
	case m.Method == "$/cancel_request":
		return s.withdrawRequest(m, t)
	case m.Method != "":
		return s.handleNotice(m, raw, t)
	case len(m.ID) > 0 && (m.Error != nil || m.Result != nil):
		return s.handleAnswer(m, t)
	}
	return errors.New("the line is neither a request nor an answer of JSON-RPC")
}

// handleAnswer handles the answer to a request of the session.
func (s *session) handleAnswer(m message, t *agent.Turn) error {
	id, err := strconv.Atoi(string(m.ID))
	s.mu.Lock()
	done := s.waiting[id]
	delete(s.waiting, id)
	s.mu.Unlock()
	if err != nil || done == nil {
		return fmt.Errorf("answer to an unknown request: %.64s", m.ID)
	}
	return done(m, t)
}

// handleRequest answers a request of the agent.
func (s *session) handleRequest(m message, t *agent.Turn) error {
	switch {
	case m.Method == sdk.ClientMethodSessionRequestPermission:
		return s.handlePermission(m, t)
	case m.Method == sdk.ClientMethodFsWriteTextFile && s.d.AcceptWrites:
		return s.in.Send(reply{JSONRPC: "2.0", ID: m.ID, Result: struct{}{}})
	}
	s.log(t, "warn", "the agent asked for %q, which is not offered", m.Method)
	return s.in.Send(reply{JSONRPC: "2.0", ID: m.ID, Error: sdk.NewMethodNotFound(m.Method)})
}

// handleNotice handles a notification that is not part of the protocol.
func (s *session) handleNotice(m message, raw json.RawMessage, t *agent.Turn) error {
	var n *Notice
	if s.d.Notice != nil {
		n = s.d.Notice(m.Method, m.Params)
	}
	if n == nil {
		s.log(t, "info", "%s", raw)
		return nil
	}
	if n.Forked != nil {
		return s.handleForked(n.Forked, t)
	}
	if n.Text != nil {
		if n.Session != string(s.id) {
			return nil // of a sub-agent
		}
		return s.appendEarlyText(*n.Text, t)
	}
	if n.Request != nil {
		s.handleSubagentRequest(*n.Request, t)
		return nil
	}
	if n.Warning != "" {
		s.log(t, "warn", "%s", n.Warning)
	}
	switch mine := n.Session == string(s.id); {
	case mine && n.Status != 0:
		s.status = n.Status
	case mine && n.Usage != (events.Usage{}):
		s.cut = n.Cut
	case mine && n.Over && s.pending && (s.seen != (events.Usage{}) || s.status != 0):
		// The notice is about this turn, because its model has answered: missing parts of the answer will not come any
		// more.
		s.fail(t, "AGENT_PROTOCOL", "the agent ended its turn without a report: its answer, or a part of it, is lost")
		return nil
	}
	if n.Usage != (events.Usage{}) || n.CostUSD != 0 {
		s.seen = plus(s.seen, n.Usage)
		s.cost += n.CostUSD
		t.Emit(events.MainConversation, events.MetadataUpdate{Usage: s.seen, CostUSD: s.spent(), Model: s.d.Shown})
	}
	return nil
}

// plus returns the sum, limited to the largest value of the counters.
func plus(a, b events.Usage) events.Usage {
	add := func(a, b uint32) uint32 { return uint32(min(uint64(a)+uint64(b), 1<<32-1)) } //nolint:gosec // bounded
	return events.Usage{
		InputTokens: add(a.InputTokens, b.InputTokens), OutputTokens: add(a.OutputTokens, b.OutputTokens),
		CacheReadTokens: add(a.CacheReadTokens, b.CacheReadTokens), CacheWriteTokens: add(a.CacheWriteTokens, b.CacheWriteTokens),
	}
}

// note journals an event in the running turn. If no turn runs, the event is kept for the next one.
func (s *session) note(t *agent.Turn, p events.Payload) {
	if !s.pending {
		s.notes = append(s.notes, p)
		return
	}
	t.Emit(events.MainConversation, p)
}

func (s *session) log(t *agent.Turn, level, format string, args ...any) {
	t.Emit(events.MainConversation, logEvent(level, format, args...))
}

func logEvent(level, format string, args ...any) events.Log {
	return events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)}
}
