package codex

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// maxPendingNotes is the maximum number of notes to the agent that are kept for the next query.
const maxPendingNotes = 16

// session implements agent.Session for one process of Codex.
type session struct {
	launch     agent.Launch
	in         agent.Stdin
	resume     string // the thread to resume, "" for a new one
	instructed bool   // the resumed thread has the prompts already

	mu          sync.Mutex // guards the fields below, which Interrupt shares with HandleLine
	unanswered  map[int]pendingRequest
	requests    int
	thread      string // id of the thread, once it has begun
	turnID      string // id of the running turn, once it is known
	interrupted bool   // the turn is to stop
	heard       bool   // the CLI was asked to stop the turn, and did not refuse

	// State of the process.
	broken   error  // why the process has no thread and will get none
	lost     string // why the earlier thread cannot be resumed, until that is reported
	model    string
	path     string                 // of the transcript
	reported bool                   // the transcript was reported
	totals   map[string]tokenCounts // by thread, as last reported
	depths   map[string]uint32      // of the sub-agents that the process has started, by thread
	notes    []string               // notes to the agent that came too late for their turn; they are sent with the next query
	// The commands of sub-agents that were stopped at the end of their turn, by thread.
	stopping map[string][]string

	// State of the turn.
	query   *runner.Query // not sent yet, because the thread has not begun
	pending bool          // a query runs
	turn    turnState
}

// pendingRequest is a request to the CLI that is not answered yet.
type pendingRequest struct {
	method string
	thread string   // its thread, if the answer needs it
	turn   string   // turn/interrupt: id of the turn
	items  []string // thread/backgroundTerminals/list: the commands to end
	note   string   // turn/steer: the text for the turn
}

// turnState is the part of a session's state that is dropped when the turn ends.
type turnState struct {
	conversations map[string]*conversation // by thread
	items         map[string]*runningItem  // not complete, by thread and item
	usage         tokenCounts
	answer        agent.AnswerText               // of the main agent
	why           *turnError                     // the last failure that the CLI does not retry
	early         map[string][]earlyNotification // by thread
	kept          int                            // number of early notifications in all threads
	maxDepth      uint32                         // levels of sub-agents that may be started; 0 for no limit
}

// newSession returns a session whose process gets its lines from in. It sends nothing.
func newSession(l agent.Launch, in agent.Stdin) *session {
	s := &session{launch: l, in: in, resume: l.Resume, unanswered: map[int]pendingRequest{}, totals: map[string]tokenCounts{}, depths: map[string]uint32{}, stopping: map[string][]string{}}
	s.resetTurn()
	return s
}

// resetTurn drops the state of the turn that has ended.
func (s *session) resetTurn() {
	s.turn = turnState{conversations: map[string]*conversation{}, items: map[string]*runningItem{}}
	s.pending, s.query = false, nil
}

// sendHandshake sends the handshake and the request for the thread.
func (s *session) sendHandshake() {
	s.sendRequest("initialize", map[string]any{
		"clientInfo":   map[string]string{"name": "spool", "title": "Spool", "version": "1"},
		"capabilities": map[string]bool{"experimentalApi": true}, // thread/backgroundTerminals/…
	}, pendingRequest{})
	s.sendJSON(rpcRequest{Method: "initialized"})
	s.requestThread()
}

// requestThread sends the request for the thread s.resume, or for a new thread if s.resume is "". handleThreadStarted handles the answer.
func (s *session) requestThread() {
	params := map[string]any{
		"cwd": s.launch.Workspace, "approvalPolicy": "untrusted", "approvalsReviewer": "user",
		// If the thread may write, the CLI trusts the workspace and loads its settings, hooks and MCP servers. Each
		// turn sets the real policy.
		"sandbox": "read-only",
	}
	if s.launch.Model != "" {
		params["model"] = s.launch.Model
	}
	if p := addedPrompt(s.launch); p != "" {
		params["developerInstructions"] = p
	}
	if config := threadConfig(s.launch); config != nil {
		params["config"] = config
	}
	if s.resume == "" {
		s.sendRequest("thread/start", params, pendingRequest{})
		return
	}
	params["threadId"], params["excludeTurns"] = s.resume, true
	s.sendRequest("thread/resume", params, pendingRequest{})
}

// sendRequest sends a request to the CLI and returns at once. It keeps a, which handleAnswer or handleError receives with the answer.
func (s *session) sendRequest(method string, params any, a pendingRequest) {
	a.method = method
	s.mu.Lock()
	s.requests++
	id := s.requests
	s.unanswered[id] = a
	s.mu.Unlock()
	s.sendJSON(rpcRequest{ID: id, Method: method, Params: params})
}

// sendJSON sends v, which must be encodable, as a line of JSON to the CLI.
func (s *session) sendJSON(v any) {
	_ = s.in.Send(v) //nolint:errcheck // see above
}

// BeginTurn begins a turn: it sends the query, or keeps it until the thread has begun. The error means that the process cannot take the query.
func (s *session) BeginTurn(q runner.Query, t *agent.Turn) error {
	if s.broken != nil {
		return s.broken
	}
	if _, err := queryInput(q); err != nil {
		return err
	}
	if s.lost != "" {
		if refusal := agent.ReportLoss(t, q.ContinueAfterLoss, s.lost); refusal != nil {
			return refusal
		}
		s.lost = ""
	}
	s.mu.Lock()
	s.interrupted, s.heard, s.turnID = false, false, ""
	thread := s.thread
	s.mu.Unlock()
	s.resetTurn()
	s.pending, s.query, s.turn.maxDepth = true, &q, q.SubagentDepth
	if thread == "" {
		return nil // handleThreadStarted sends the query
	}
	return s.sendQuery()
}

// externalSandbox is a setting for the CLI: commands are isolated from outside. The CLI's own sandbox needs privileges that the sandbox does not
// have.
var externalSandbox = map[string]string{"type": "externalSandbox", "networkAccess": "enabled"}

// sendQuery sends the query that BeginTurn has kept, after the notes for it, and so starts the CLI's turn.
func (s *session) sendQuery() error {
	parts, err := queryInput(*s.query)
	if err != nil {
		return err
	}
	for i, note := range s.notes {
		parts = slices.Insert(parts, i, any(textPart(note)))
	}
	s.query, s.notes = nil, nil
	s.turn.conversations[s.thread] = &conversation{id: events.MainConversation}
	s.sendRequest("turn/start", map[string]any{"threadId": s.thread, "input": parts, "sandboxPolicy": externalSandbox}, pendingRequest{})
	return nil
}

// imageTypes are the media types that the model API accepts.
var imageTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp"}

// textPart returns a text as a part of a query in the format of the protocol.
func textPart(s string) map[string]any { return map[string]any{"type": "text", "text": s} }

// queryInput converts a query to the format of the protocol.
func queryInput(q runner.Query) ([]any, error) {
	var parts []any
	text := func(s string) { parts = append(parts, textPart(s)) }
	if q.Content != "" {
		text(q.Content)
	}
	for i, p := range q.Parts {
		switch p.Type {
		case "text":
			text(p.Text)
		case "image":
			if !slices.Contains(imageTypes, p.MediaType) {
				return nil, fmt.Errorf("query.parts[%d].mediaType: %q is not one of %v", i, p.MediaType, imageTypes)
			}
			if _, err := base64.StdEncoding.DecodeString(p.Data); err != nil || p.Data == "" {
				return nil, fmt.Errorf("query.parts[%d].data: is not base64", i)
			}
			parts = append(parts, map[string]any{"type": "image", "url": "data:" + p.MediaType + ";base64," + p.Data})
		default:
			return nil, fmt.Errorf("query.parts[%d].type: %q is not text or image", i, p.Type)
		}
	}
	return parts, nil
}

// Interrupt asks the CLI to stop the turn as soon as it has begun.
func (s *session) Interrupt() error {
	s.mu.Lock()
	s.interrupted = true
	s.mu.Unlock()
	s.stopInterruptedTurn()
	return nil
}

// stopInterruptedTurn asks the CLI to stop the turn, if the turn was interrupted, its id is known, and the CLI was not asked yet or has refused.
func (s *session) stopInterruptedTurn() {
	s.mu.Lock()
	thread, turn := s.thread, s.turnID
	due := s.interrupted && !s.heard && turn != ""
	if due {
		s.heard = true
	}
	s.mu.Unlock()
	if due {
		s.sendTurnInterrupt(thread, turn)
	}
}

// sendTurnInterrupt sends the request to stop a turn of a thread.
func (s *session) sendTurnInterrupt(thread, turn string) {
	s.sendRequest("turn/interrupt", map[string]string{"threadId": thread, "turnId": turn}, pendingRequest{turn: turn})
}

// isInterrupted reports whether the running turn was asked to stop.
func (s *session) isInterrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// runningTurnID returns the id of the running turn of this session, "" if none runs or its id is not known.
func (s *session) runningTurnID() (turn string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnID
}

// HandleLine handles a line that the CLI's process printed.
func (s *session) HandleLine(raw []byte, t *agent.Turn) error {
	l, err := decode[outputLine](raw, "line")
	if err != nil {
		return err
	}
	switch {
	case l.Method != "" && len(l.ID) > 0:
		return s.answerQuestion(l, t)
	case l.Method == "serverRequest/resolved":
		return s.handleQuestionResolved(l, t)
	case l.Method != "":
		return s.handleNotification(l, raw, t)
	case len(l.ID) > 0:
		return s.handleAnswer(l, t)
	}
	s.logf(t, "info", "%s", raw)
	return nil
}

// handleAnswer handles the CLI's answer to a request of the session.
func (s *session) handleAnswer(l outputLine, t *agent.Turn) error {
	id, err := strconv.Atoi(string(l.ID))
	s.mu.Lock()
	was, ok := s.unanswered[id]
	delete(s.unanswered, id)
	s.mu.Unlock()
	if err != nil || !ok {
		return fmt.Errorf("answer to an unknown request: %s", l.ID)
	}
	if l.Error != nil {
		s.handleError(was, l.Error, t)
		return nil
	}
	switch was.method {
	case "initialize":
		return s.checkVersion(l.Result, t)
	case "thread/start", "thread/resume":
		return s.handleThreadStarted(was.method == "thread/resume", l.Result, t)
	case "turn/start":
		r, err := decode[notification](l.Result, "turn/start")
		if err != nil {
			return err
		}
		s.setTurnID(r.Turn.ID)
		if s.pending && !s.reported {
			s.reported = true
			s.reportTranscript(t)
		}
	case "thread/backgroundTerminals/list":
		return s.terminateListedCommands(was, l.Result)
	}
	return nil
}

// checkVersion logs a warning if the version in result is not TestedVersion. The format is `spool/0.169.0 (…)`.
func (s *session) checkVersion(result json.RawMessage, t *agent.Turn) error {
	r, err := decode[struct {
		UserAgent string `json:"userAgent"`
	}](result, "initialize")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(r.UserAgent, "/")
	version, _, _ := strings.Cut(rest, " ")
	if version != TestedVersion {
		s.logf(t, "warn", "Codex is version %q; this runner was tested with %s", version, TestedVersion)
	}
	return nil
}

// handleThreadStarted stores the id of the thread, and sends the query that waits for the thread.
func (s *session) handleThreadStarted(resumed bool, result json.RawMessage, t *agent.Turn) error {
	r, err := decode[struct {
		Thread threadInfo `json:"thread"`
		Model  string     `json:"model"`
	}](result, "thread")
	if err == nil && r.Thread.ID == "" {
		err = errors.New("thread: has no id")
	}
	if err != nil {
		s.refuseQueries(err, t)
		return nil
	}
	s.mu.Lock()
	s.thread = r.Thread.ID
	s.mu.Unlock()
	s.model, s.path = r.Model, r.Thread.Path
	if resumed && !s.instructed {
		s.sendRequest("thread/inject_items", map[string]any{"threadId": s.thread, "items": []any{map[string]any{
			"type": "message", "role": "developer", "content": []any{map[string]string{"type": "input_text", "text": addedPrompt(s.launch)}},
		}}}, pendingRequest{})
	}
	if s.query != nil {
		return s.sendQuery()
	}
	return nil
}

// setTurnID stores the id of the running turn, which arrives as an answer and as a notification, in either order.
func (s *session) setTurnID(turn string) {
	s.mu.Lock()
	if s.pending && turn != "" {
		s.turnID = turn
	}
	s.mu.Unlock()
	s.stopInterruptedTurn()
}

// handleError handles an error with which the CLI answers the request was. If a thread cannot be resumed, it requests a new one. If no thread can
// be opened, the session refuses every query.
func (s *session) handleError(was pendingRequest, e *rpcError, t *agent.Turn) {
	err := fmt.Errorf("%s was refused: %s (code %d)", was.method, e.Message, e.Code)
	switch was.method {
	case "thread/resume":
		s.logf(t, "warn", "%v", err)
		why := lostThreadReason(s.launch)
		if !s.launch.ContinueAfterLoss {
			s.refuseQueries(agent.LossRefusal(why), t)
			return
		}
		if s.resume = ""; s.pending {
			t.Emit(events.MainConversation, agent.LossEvent(why))
		} else {
			s.lost = why
		}
		s.requestThread()
	case "turn/interrupt":
		// The turn does not run yet, or has ended: turn/started asks again.
		s.mu.Lock()
		if was.turn == s.turnID {
			s.heard = false
		}
		s.mu.Unlock()
		s.logf(t, "debug", "%v", err)
	case "turn/steer":
		s.logf(t, "debug", "%v", err)
		if was.thread == s.thread && len(s.notes) < maxPendingNotes { // the turn had ended
			s.notes = append(s.notes, was.note)
		}
	case "thread/inject_items", "thread/backgroundTerminals/list", "thread/backgroundTerminals/terminate":
		s.logf(t, "warn", "%v", err)
	case "turn/start":
		s.endTurn(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
	default: // initialize, thread/start: there will be no thread
		s.refuseQueries(err, t)
	}
}

// refuseQueries marks the process as unusable because of err: the next query starts another process.
func (s *session) refuseQueries(err error, t *agent.Turn) {
	s.broken = err
	if s.pending {
		end := runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}
		var refusal *runner.CommandError
		if errors.As(err, &refusal) {
			end.Code, end.Message = refusal.Code, refusal.Message
		}
		s.endTurn(end, t)
	}
}

// logf journals a formatted log event.
func (s *session) logf(t *agent.Turn, level, format string, args ...any) {
	t.Emit(events.MainConversation, events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)})
}
