package acp

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// pingMethod is a JSON-RPC method that no agent implements. The protocol reserves the underscore for extensions; the agent's answer, an error for
// an unknown method, shows that the agent is alive.
const pingMethod = "_spool/ping"

// session implements agent.Session for one process of an agent that speaks the Agent Client Protocol.
type session struct {
	d     Dialect
	place agent.Folders
	in    agent.Stdin
	now   func() time.Time

	mu          sync.Mutex    // guards the fields below, which Interrupt shares with HandleLine and BeginTurn
	id          sdk.SessionId // "" until there is a session
	asking      bool          // the query was sent, and the turn has not ended
	interrupted bool          // the turn is to stop
	late        bool          // a turn was asked to stop more than once: the agent may apply the last request to the next turn
	requests    int
	waiting     map[int]answerHandler // requests without an answer, by id
	asked       map[string]callKey    // the call of each permission request that is not answered, by the request's id

	// State of the process.
	caps       sdk.AgentCapabilities
	resume     string               // the session to resume
	fork       *runner.Fork         // with resume: where to cut a copy of it; nil to resume the session itself
	continues  bool                 // with resume: begin a new session if that one is lost
	forked     *ForkResult          // the copy that the process made, once it is known
	awaitsCopy bool                 // the handshake waits for the copy
	opening    string               // method of the handshake's last request
	ready      bool                 // the handshake is complete
	loading    bool                 // the agent repeats the earlier conversation
	repeated   bool                 // it has repeated a message
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

// turnState is the part of a session's state that is reset at the beginning of each turn.
type turnState struct {
	main   *conversation
	subs   map[sdk.SessionId]*conversation // of the sub-agents
	held   []heldNotice                    // of sub-agents that run in calls which the agent has not reported yet
	calls  map[callKey]*runningCall
	shown  bool // a message or a call was shown
	began  float64
	seen   events.Usage // the sum of the notices
	status int          // the HTTP status by which the model failed
	cut    bool         // the model's last answer reached its limit
	early  earlyText
	heard  map[string]bool // permission requests of sub-agents that were handled, by id
	whole  bool            // the message is complete when the turn ends

	answered time.Time // when the query was answered; zero unless the turn ends when the agent is quiet
	outcome  runner.TurnEnd
}

// answerHandler is called with the agent's answer to a request of the session.
type answerHandler func(m rpcMessage, t *agent.Turn) error

// OpenSession returns a session for a process that speaks the dialect d of the protocol, and sends the handshake.
func OpenSession(d Dialect, l agent.Launch, in agent.Stdin) agent.Session {
	if d.Now == nil {
		d.Now = time.Now
	}
	if d.Shown == "" {
		d.Shown = d.Model
	}
	s := &session{d: d, place: l.Folders, in: in, now: d.Now, resume: l.Resume, fork: l.Fork, continues: l.ContinueAfterLoss, waiting: map[int]answerHandler{}, asked: map[string]callKey{}, turnState: newTurnState(0)}
	s.startHandshake()
	return s
}

// newTurnState returns the state for a new turn. cost is the cost of the session in dollars when the turn begins.
func newTurnState(cost float64) turnState {
	return turnState{
		main: &conversation{conv: events.MainConversation}, subs: map[sdk.SessionId]*conversation{}, calls: map[callKey]*runningCall{}, heard: map[string]bool{}, began: cost,
	}
}

// BeginTurn begins a turn: it sends the query, or keeps it until the handshake is complete. The error means that the process cannot take the query.
func (s *session) BeginTurn(q runner.Query, t *agent.Turn) error {
	if s.broken != nil {
		return s.broken
	}
	prompt, err := s.promptContent(q)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.interrupted = false
	s.mu.Unlock()
	s.pending, s.prompt, s.turnState = true, prompt, newTurnState(s.cost)
	for _, n := range s.notes {
		t.Emit(events.MainConversation, n)
	}
	s.notes = nil
	if !s.ready {
		s.awaitHandshake(t)
		return nil
	}
	// A warm agent that prints nothing is considered hung, and a model may take long to answer: the agent gets a request that
	// it answers without its model. That comes first if the agent might not answer it while it handles the query.
	if s.d.AnswersInitialize {
		if err := s.sendPrompt(t); err != nil {
			return err
		}
		return s.sendInitialize(ignoreAnswer)
	}
	if err := s.sendPing(ignoreAnswer); err != nil {
		return err
	}
	return s.sendPrompt(t)
}

// awaitHandshake ends the turn if the agent does not answer a request of the handshake in time. Every line of the agent restarts the time.
func (s *session) awaitHandshake(t *agent.Turn) {
	limit := t.AnswerTimeout()
	if limit == 0 {
		return
	}
	limit = max(limit, s.d.StartTime)
	t.SetAlarm(limit, func() {
		s.refuseQueries(t, "AGENT_PROTOCOL", fmt.Sprintf("the agent did not answer %s within %s", s.opening, limit))
	})
}

// sendPing sends a request that the agent answers without its model. done handles the answer, which shows that the agent is alive.
func (s *session) sendPing(done answerHandler) error {
	if s.caps.SessionCapabilities.List != nil {
		return s.sendRequest(sdk.AgentMethodSessionList, sdk.ListSessionsRequest{Cwd: &s.place.Workspace}, done)
	}
	return s.sendRequest(pingMethod, struct{}{}, done)
}

// sendPrompt sends the query as session/prompt, with the instructions before the first query of a process. If the turn was interrupted before, it
// ends the turn instead.
func (s *session) sendPrompt(t *agent.Turn) error {
	s.mu.Lock()
	stopped := s.interrupted
	s.asking = !stopped
	s.mu.Unlock()
	if stopped {
		s.finishTurn(runner.TurnEnd{Outcome: runner.OutcomeInterrupted}, t)
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
	return s.sendRequest(sdk.AgentMethodSessionPrompt, sdk.PromptRequest{SessionId: s.id, Prompt: prompt}, s.handlePromptAnswer)
}

// Interrupt asks the agent to stop the turn. If the query was not sent yet, Interrupt ends the turn.
func (s *session) Interrupt() error {
	s.mu.Lock()
	s.interrupted = true
	id, asking := s.id, s.asking
	s.mu.Unlock()
	if !asking {
		return nil // the turn ends with the handshake
	}
	err := s.requestStop(id, maxStopRequests)
	s.cancelOpenRequests()
	return err
}

// maxStopRequests is the maximum number of times that the session repeats a request to stop a turn, while the agent continues the turn.
const maxStopRequests = 3

// requestStop sends a request to stop the turn, and a ping after it. If the turn goes on when the agent has answered the ping, requestStop repeats
// the request, at most left times, because an agent ignores a request that arrives before the agent has begun the turn.
func (s *session) requestStop(id sdk.SessionId, left int) error {
	if left < maxStopRequests {
		s.markRepeatedStop()
	}
	if err := s.sendCancel(id); err != nil || left == 0 {
		return err
	}
	return s.sendPing(func(rpcMessage, *agent.Turn) error {
		if !s.isStopping() {
			return nil
		}
		return s.requestStop(id, left-1)
	})
}

// markRepeatedStop records that the turn is asked to stop more than once.
func (s *session) markRepeatedStop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.late = true
}

// sendCancel sends session/cancel, the protocol's request to stop a turn.
func (s *session) sendCancel(id sdk.SessionId) error {
	return s.in.Send(rpcRequest{JSONRPC: "2.0", Method: sdk.AgentMethodSessionCancel, Params: sdk.CancelNotification{SessionId: id}})
}

// repeatStopRequest sends the request to stop again, if the turn was interrupted. It is called when the agent begins a message or a call, because
// the agent may not have begun the turn at the first request.
func (s *session) repeatStopRequest() error {
	if !s.isStopping() {
		return nil
	}
	s.markRepeatedStop()
	return s.sendCancel(s.id)
}

// isStopping reports whether the turn was asked to stop and the agent has not answered the query yet.
func (s *session) isStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted && s.asking
}

// isInterrupted reports whether the running turn was asked to stop.
func (s *session) isInterrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// sendRequest sends a JSON-RPC request and returns at once. HandleLine calls done when the answer arrives.
func (s *session) sendRequest(method string, params any, done answerHandler) error {
	s.mu.Lock()
	s.requests++
	id := s.requests
	s.waiting[id] = done
	if !s.ready {
		s.opening = method
	}
	s.mu.Unlock()
	return s.in.Send(rpcRequest{JSONRPC: "2.0", ID: &id, Method: method, Params: params})
}

// HandleLine handles a line that the agent's process printed.
func (s *session) HandleLine(raw []byte, t *agent.Turn) error {
	err := s.handleMessage(raw, t)
	switch {
	case !s.pending:
	case !s.ready:
		s.awaitHandshake(t)
	case !s.answered.IsZero():
		s.awaitQuiet(t)
	}
	return err
}

// handleMessage handles a message of the agent.
func (s *session) handleMessage(raw []byte, t *agent.Turn) error {
	m, err := decode[rpcMessage](raw, "message")
	if err != nil {
		return err
	}
	if !hasValue(m.ID) {
		m.ID = nil // some programs write null into notifications
	}
	switch {
	case m.Method == sdk.ClientMethodSessionUpdate:
		err := s.handleUpdate(m, t)
		if len(m.ID) > 0 { // an agent that sends it as a request waits for the answer
			err = errors.Join(err, s.in.Send(rpcReply{JSONRPC: "2.0", ID: m.ID, Result: struct{}{}}))
		}
		return err
	case m.Method != "" && len(m.ID) > 0:
		return s.handleRequest(m, t)
	case m.Method == "$/cancel_request":
		return s.withdrawRequest(m, t)
	case m.Method != "":
		return s.handleExtension(m, raw, t)
	case len(m.ID) > 0 || m.Error != nil || m.Result != nil:
		return s.handleAnswer(m, t)
	}
	return errors.New("the line is neither a request nor an answer of JSON-RPC")
}

// handleAnswer passes an answer of the agent to the answerHandler of its request.
func (s *session) handleAnswer(m rpcMessage, t *agent.Turn) error {
	id := m.requestNumber()
	s.mu.Lock()
	done, known := s.waiting[id], id > 0 && id <= s.requests
	delete(s.waiting, id)
	s.mu.Unlock()
	switch {
	case done != nil:
		return done(m, t)
	case known:
		return fmt.Errorf("request %d was answered before", id)
	case s.pending && s.answered.IsZero() && (m.Error != nil || answersPrompt(m.Result)):
		// It is the answer that the turn waits for: no other will come.
		s.refuseQueries(t, "AGENT_PROTOCOL", fmt.Sprintf("the agent sent an answer with the id %.64q, which no request has: %s", m.ID, cmp.Or(m.Error.text(), string(m.Result))))
		return nil
	}
	return fmt.Errorf("answer to an unknown request: %.64s", m.ID)
}

// answersPrompt reports whether result is that of a request session/prompt.
func answersPrompt(result json.RawMessage) bool {
	var r struct {
		StopReason json.RawMessage `json:"stopReason"`
	}
	return json.Unmarshal(result, &r) == nil && r.StopReason != nil
}

// handleRequest handles a request that the agent sends to the session.
func (s *session) handleRequest(m rpcMessage, t *agent.Turn) error {
	switch {
	case m.Method == sdk.ClientMethodSessionRequestPermission:
		return s.handlePermission(m, t)
	case m.Method == sdk.ClientMethodFsWriteTextFile && s.d.AcceptWrites:
		return s.in.Send(rpcReply{JSONRPC: "2.0", ID: m.ID, Result: struct{}{}})
	}
	s.journalLog(t, "warn", "the agent asked for %q, which is not offered", m.Method)
	return s.in.Send(rpcReply{JSONRPC: "2.0", ID: m.ID, Error: sdk.NewMethodNotFound(m.Method)})
}

// handleExtension handles a notification of the agent that is not part of the protocol.
func (s *session) handleExtension(m rpcMessage, raw json.RawMessage, t *agent.Turn) error {
	var n *Notice
	if s.d.Notice != nil {
		n = s.d.Notice(m.Method, m.Params)
	}
	if n == nil {
		s.journalLog(t, "info", "%s", raw)
		return nil
	}
	if n.Forked != nil {
		return s.handleForkResult(n.Forked, t)
	}
	if n.Text != nil {
		if n.Session != string(s.id) {
			return nil // of a sub-agent
		}
		return s.appendEarlyText(*n.Text, t)
	}
	if hasValue(n.Update) || n.Request != nil {
		s.held = append(s.held, heldNotice{*n, s.now()})
		return s.journalHeld(t, false)
	}
	if n.Warning != "" {
		s.journalLog(t, "warn", "%s", n.Warning)
	}
	switch mine := n.Session == string(s.id); {
	case mine && n.Status != 0:
		s.status = n.Status
	case mine && n.Usage != (events.Usage{}):
		s.cut = n.Cut
	case mine && n.Over && s.pending && s.answered.IsZero() && (s.seen != (events.Usage{}) || s.status != 0):
		// The notice is about this turn, because its model has answered: missing parts of the answer will not come any
		// more.
		s.refuseQueries(t, "AGENT_PROTOCOL", "the agent ended its turn without a report: its answer, or a part of it, is lost")
		return nil
	}
	if n.Usage != (events.Usage{}) || n.CostUSD != 0 {
		s.seen = addUsage(s.seen, n.Usage)
		s.cost += n.CostUSD
		t.Emit(events.MainConversation, events.MetadataUpdate{Usage: s.seen, CostUSD: s.turnCost(), Model: s.d.Shown})
	}
	return nil
}

// addUsage returns the sum of two token counts. A counter that would overflow has its largest value.
func addUsage(a, b events.Usage) events.Usage {
	add := func(a, b uint32) uint32 { return uint32(min(uint64(a)+uint64(b), 1<<32-1)) } //nolint:gosec // bounded
	return events.Usage{
		InputTokens: add(a.InputTokens, b.InputTokens), OutputTokens: add(a.OutputTokens, b.OutputTokens),
		CacheReadTokens: add(a.CacheReadTokens, b.CacheReadTokens), CacheWriteTokens: add(a.CacheWriteTokens, b.CacheWriteTokens),
	}
}

// journalOrQueue journals an event in the running turn. If no turn runs, the event is kept for the next turn.
func (s *session) journalOrQueue(t *agent.Turn, p events.Payload) {
	if !s.pending {
		s.notes = append(s.notes, p)
		return
	}
	t.Emit(events.MainConversation, p)
}

// journalLog journals a formatted log event in the running turn, or keeps it for the next turn.
func (s *session) journalLog(t *agent.Turn, level, format string, args ...any) {
	t.Emit(events.MainConversation, logEvent(level, format, args...))
}

// logEvent returns a log event with a formatted message.
func logEvent(level, format string, args ...any) events.Log {
	return events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)}
}
