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

// maxQueued is the largest number of events between turns that are kept for the next turn.
const maxQueued = 64

// maxNotes is the largest number of notes to the agent that are kept for the next query.
const maxNotes = 16

// session drives one process of the CLI.
type session struct {
	launch     agent.Launch
	in         agent.Stdin
	resume     string // the thread to resume, "" for a new one
	instructed bool   // the resumed thread has the prompts already

	mu          sync.Mutex // guards the fields below, which Interrupt shares with Line
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
	path     string            // of the transcript
	reported bool              // the transcript was reported
	totals   map[string]tokens // by thread, as last reported
	queued   []events.Payload  // events between turns, for the next turn
	notes    []string          // notes to the agent that came too late for their turn; they are sent with the next query
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

// turnState is the state that is dropped when the turn ends.
type turnState struct {
	conversations map[string]*conversation // by thread
	items         map[string]*runningItem  // not complete, by thread and item
	todo          string                   // the open todo block
	usage         tokens
	result        string                         // the agent's last message
	why           *turnError                     // the last failure that the CLI does not retry
	early         map[string][]earlyNotification // by thread
	kept          int                            // number of early notifications in all threads
}

func newSession(l agent.Launch, in agent.Stdin) *session {
	s := &session{launch: l, in: in, resume: l.Resume, unanswered: map[int]pendingRequest{}, totals: map[string]tokens{}, stopping: map[string][]string{}}
	s.resetTurn()
	return s
}

// resetTurn drops the state of the turn.
func (s *session) resetTurn() {
	s.turn = turnState{conversations: map[string]*conversation{}, items: map[string]*runningItem{}}
	s.pending, s.query = false, nil
}

// open sends the handshake and the request for the thread.
func (s *session) open() {
	s.ask("initialize", map[string]any{
		"clientInfo":   map[string]string{"name": "spool", "title": "Spool", "version": "1"},
		"capabilities": map[string]bool{"experimentalApi": true}, // thread/backgroundTerminals/…
	}, pendingRequest{})
	s.send(request{Method: "initialized"})
	s.requestThread()
}

// requestThread sends the request for the thread: for s.resume, or for a new one if that is "". threadStarted handles the answer.
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
	if p := prompt(s.launch); p != "" {
		params["developerInstructions"] = p
	}
	if config := threadConfig(s.launch); config != nil {
		params["config"] = config
	}
	if s.resume == "" {
		s.ask("thread/start", params, pendingRequest{})
		return
	}
	params["threadId"], params["excludeTurns"] = s.resume, true
	s.ask("thread/resume", params, pendingRequest{})
}

// ask sends a request to the CLI and returns at once. It keeps a, which handleAnswer or handleError gets with the answer.
func (s *session) ask(method string, params any, a pendingRequest) {
	a.method = method
	s.mu.Lock()
	s.requests++
	id := s.requests
	s.unanswered[id] = a
	s.mu.Unlock()
	s.send(request{ID: id, Method: method, Params: params})
}

// send writes a value that always marshals.
func (s *session) send(v any) {
	_ = s.in.Send(v) //nolint:errcheck // see above
}

// Begin begins a turn: it sends the query, or keeps it until the thread has begun. The error means that the process cannot take the query.
func (s *session) Begin(q runner.Query, t *agent.Turn) error {
	if s.broken != nil {
		return s.broken
	}
	if _, err := input(q); err != nil {
		return err
	}
	s.mu.Lock()
	s.interrupted, s.heard, s.turnID = false, false, ""
	thread := s.thread
	s.mu.Unlock()
	s.resetTurn()
	s.pending, s.query = true, &q
	if s.lost != "" {
		s.reportLostTranscript(t)
	}
	for _, p := range s.queued {
		t.Emit(events.MainConversation, p)
	}
	s.queued = nil
	if thread == "" {
		return nil // threadStarted sends the query
	}
	return s.sendQuery()
}

// reportLostTranscript journals that the agent does not know the earlier turns, because its thread is lost.
func (s *session) reportLostTranscript(t *agent.Turn) {
	t.Emit(events.MainConversation, events.Error{
		Code: "TRANSCRIPT_LOST", Message: s.lost + ": the agent does not know the turns before",
	})
	s.lost = ""
}

// externalSandbox tells the CLI that commands are isolated from outside: the CLI's own sandbox needs privileges that
// the sandbox does not have.
var externalSandbox = map[string]string{"type": "externalSandbox", "networkAccess": "enabled"}

// sendQuery sends the query that Begin has kept, after the notes for it, and so starts the CLI's turn.
func (s *session) sendQuery() error {
	parts, err := input(*s.query)
	if err != nil {
		return err
	}
	for i, note := range s.notes {
		parts = slices.Insert(parts, i, any(textPart(note)))
	}
	s.query, s.notes = nil, nil
	s.turn.conversations[s.thread] = &conversation{id: events.MainConversation}
	s.ask("turn/start", map[string]any{"threadId": s.thread, "input": parts, "sandboxPolicy": externalSandbox}, pendingRequest{})
	return nil
}

// imageTypes are the media types that the model API accepts.
var imageTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp"}

func textPart(s string) map[string]any { return map[string]any{"type": "text", "text": s} }

// input returns the query in the format of the protocol.
func input(q runner.Query) ([]any, error) {
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
	s.stopIfDue()
	return nil
}

// stopIfDue asks the CLI to stop the turn if the turn was interrupted, its id is known, and the CLI was not asked yet or has refused.
func (s *session) stopIfDue() {
	s.mu.Lock()
	thread, turn := s.thread, s.turnID
	due := s.interrupted && !s.heard && turn != ""
	if due {
		s.heard = true
	}
	s.mu.Unlock()
	if due {
		s.stop(thread, turn)
	}
}

// stop asks the CLI to stop a turn of a thread.
func (s *session) stop(thread, turn string) {
	s.ask("turn/interrupt", map[string]string{"threadId": thread, "turnId": turn}, pendingRequest{turn: turn})
}

func (s *session) isInterrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// running returns the id of the running turn of this session, "" for none.
func (s *session) running() (turn string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnID
}

// Line handles a line that the CLI prints.
func (s *session) Line(raw []byte, t *agent.Turn) error {
	l, err := decode[line](raw, "line")
	if err != nil {
		return err
	}
	switch {
	case l.Method != "" && len(l.ID) > 0:
		return s.answerQuestion(l, t)
	case l.Method == "serverRequest/resolved":
		return s.questionResolved(l, t)
	case l.Method != "":
		return s.handleNotification(l, raw, t)
	case len(l.ID) > 0:
		return s.handleAnswer(l, t)
	}
	s.logf(t, "info", "%s", raw)
	return nil
}

// handleAnswer handles the answer to a request.
func (s *session) handleAnswer(l line, t *agent.Turn) error {
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
		return s.threadStarted(was.method == "thread/resume", l.Result, t)
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
		return s.terminate(was, l.Result)
	}
	return nil
}

// checkVersion logs a warning if the CLI's version is not Tested. The format is `spool/0.169.0 (…)`.
func (s *session) checkVersion(result json.RawMessage, t *agent.Turn) error {
	r, err := decode[struct {
		UserAgent string `json:"userAgent"`
	}](result, "initialize")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(r.UserAgent, "/")
	version, _, _ := strings.Cut(rest, " ")
	if version != Tested {
		s.logf(t, "warn", "Codex is version %q; this runner was tested with %s", version, Tested)
	}
	return nil
}

// threadStarted stores the thread's id, and sends the query that waits for it.
func (s *session) threadStarted(resumed bool, result json.RawMessage, t *agent.Turn) error {
	r, err := decode[struct {
		Thread thread `json:"thread"`
		Model  string `json:"model"`
	}](result, "thread")
	if err == nil && r.Thread.ID == "" {
		err = errors.New("thread: has no id")
	}
	if err != nil {
		s.fail(err, t)
		return nil
	}
	s.mu.Lock()
	s.thread = r.Thread.ID
	s.mu.Unlock()
	s.model, s.path = r.Model, r.Thread.Path
	if resumed && !s.instructed {
		s.ask("thread/inject_items", map[string]any{"threadId": s.thread, "items": []any{map[string]any{
			"type": "message", "role": "developer", "content": []any{map[string]string{"type": "input_text", "text": prompt(s.launch)}},
		}}}, pendingRequest{})
	}
	if s.query != nil {
		return s.sendQuery()
	}
	return nil
}

// setTurnID stores the turn's id, which comes as an answer and as a notification, in either order.
func (s *session) setTurnID(turn string) {
	s.mu.Lock()
	if s.pending && turn != "" {
		s.turnID = turn
	}
	s.mu.Unlock()
	s.stopIfDue()
}

// handleError handles an error of the CLI in answer to the request was. If a thread cannot be resumed, it requests a new one; if no thread can be
// had, the process takes no query.
func (s *session) handleError(was pendingRequest, e *rpcError, t *agent.Turn) {
	err := fmt.Errorf("%s was refused: %s (code %d)", was.method, e.Message, e.Code)
	switch was.method {
	case "thread/resume":
		s.logf(t, "warn", "%v", err)
		s.lost, s.resume = lostReason(s.launch), ""
		if s.pending {
			s.reportLostTranscript(t)
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
		if was.thread == s.thread && len(s.notes) < maxNotes { // the turn had ended
			s.notes = append(s.notes, was.note)
		}
	case "thread/inject_items", "thread/backgroundTerminals/list", "thread/backgroundTerminals/terminate":
		s.logf(t, "warn", "%v", err)
	case "turn/start":
		s.end(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
	default: // initialize, thread/start: there will be no thread
		s.fail(err, t)
	}
}

// fail marks the process as unusable: the next query starts another process.
func (s *session) fail(err error, t *agent.Turn) {
	s.broken = err
	if s.pending {
		s.end(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
	}
}

// emit journals an event in the running turn. Between turns it keeps up to maxQueued events for the next turn.
func (s *session) emit(t *agent.Turn, p events.Payload) {
	switch {
	case s.pending:
		t.Emit(events.MainConversation, p)
	case len(s.queued) < maxQueued:
		s.queued = append(s.queued, p)
	}
}

func (s *session) logf(t *agent.Turn, level, format string, args ...any) {
	s.emit(t, events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)})
}
