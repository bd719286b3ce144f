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

// maxUnsaid is how many events between turns are kept for the next one.
const maxUnsaid = 64

// maxNotes is how many notes to the agent are kept for the next query.
const maxNotes = 16

// session translates for one process.
type session struct {
	launch     agent.Launch
	in         agent.Stdin
	resume     string // the thread to go on with, "" for a new one
	instructed bool   // and it knows the prompts already

	mu          sync.Mutex // guards what Interrupt shares with Line
	asked       map[int]asked
	requests    int
	thread      string // its id, once it has begun
	turnID      string // of the turn that runs, once it is known
	interrupted bool   // the turn was asked to stop
	heard       bool   // and the CLI was told so, and did not refuse

	// Of the process.
	broken error  // why there is no thread, and will be none
	lost   string // why the thread before cannot be gone on with, until it was reported
	model  string
	path   string            // of the transcript
	told   bool              // that there is one
	totals map[string]tokens // by thread, as last told
	unsaid []events.Payload  // came between turns
	notes  []string          // to the agent, that came too late for their turn
	// Sub-agents that were stopped with their turn's end, by thread, and their commands.
	stopping map[string][]string

	// Of the turn.
	query   *runner.Query // given, and not yet sent: there is no thread yet
	pending bool          // a query was given and is not answered
	turn    turnState
}

// asked is a request of ours that is not answered.
type asked struct {
	method string
	thread string   // its thread, where the answer needs it
	turn   string   // turn/interrupt: the turn's
	items  []string // thread/backgroundTerminals/list: the commands to end
	note   string   // turn/steer: what the turn is told
}

// turnState is forgotten when the turn ends.
type turnState struct {
	conversations map[string]*conversation // by thread
	items         map[string]*work         // at work, by thread and item
	todo          string                   // the open todo block
	usage         tokens
	result        string             // the agent's last words
	why           *turnError         // the last failure that is not tried again
	early         map[string][]early // by thread
	kept          int                // of them, in all
}

func newSession(l agent.Launch, in agent.Stdin) *session {
	s := &session{launch: l, in: in, resume: l.Resume, asked: map[int]asked{}, totals: map[string]tokens{}, stopping: map[string][]string{}}
	s.forget()
	return s
}

func (s *session) forget() {
	s.turn = turnState{conversations: map[string]*conversation{}, items: map[string]*work{}}
	s.pending, s.query = false, nil
}

// open shakes hands and begins the thread, or resumes the one that is known.
func (s *session) open() {
	s.ask("initialize", map[string]any{
		"clientInfo":   map[string]string{"name": "spool", "title": "Spool", "version": "1"},
		"capabilities": map[string]bool{"experimentalApi": true}, // thread/backgroundTerminals/…
	}, asked{})
	s.send(request{Method: "initialized"})
	s.begin()
}

// begin asks for the thread.
func (s *session) begin() {
	params := map[string]any{
		"cwd": s.launch.Workspace, "approvalPolicy": "untrusted", "approvalsReviewer": "user",
		// A thread that may write makes its workspace a trusted one, whose settings,
		// hooks and MCP servers are taken. Each turn says how it really is.
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
		s.ask("thread/start", params, asked{})
		return
	}
	params["threadId"], params["excludeTurns"] = s.resume, true
	s.ask("thread/resume", params, asked{})
}

// ask sends a request and remembers what it was.
func (s *session) ask(method string, params any, a asked) {
	a.method = method
	s.mu.Lock()
	s.requests++
	id := s.requests
	s.asked[id] = a
	s.mu.Unlock()
	s.send(request{ID: id, Method: method, Params: params})
}

// send writes a value of our own making, which can be encoded.
func (s *session) send(v any) {
	_ = s.in.Send(v) //nolint:errcheck // see above
}

// Begin sends the query, or keeps it until there is a thread.
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
	s.forget()
	s.pending, s.query = true, &q
	if s.lost != "" {
		s.reportLost(t)
	}
	for _, p := range s.unsaid {
		t.Emit(events.MainConversation, p)
	}
	s.unsaid = nil
	if thread == "" {
		return nil // its answer sends the query
	}
	return s.start()
}

func (s *session) reportLost(t *agent.Turn) {
	t.Emit(events.MainConversation, events.Error{
		Code: "TRANSCRIPT_LOST", Message: s.lost + ": the agent does not know the turns before",
	})
	s.lost = ""
}

// outer says that commands are contained from outside: the CLI's own sandbox
// needs rights that ours takes away.
var outer = map[string]string{"type": "externalSandbox", "networkAccess": "enabled"}

// start gives the query to the thread.
func (s *session) start() error {
	parts, err := input(*s.query)
	if err != nil {
		return err
	}
	for i, note := range s.notes {
		parts = slices.Insert(parts, i, any(textPart(note)))
	}
	s.query, s.notes = nil, nil
	s.turn.conversations[s.thread] = &conversation{id: events.MainConversation}
	s.ask("turn/start", map[string]any{"threadId": s.thread, "input": parts, "sandboxPolicy": outer}, asked{})
	return nil
}

// imageTypes are what the model's API takes.
var imageTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp"}

func textPart(s string) map[string]any { return map[string]any{"type": "text", "text": s} }

// input is a query in the protocol's shape.
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

// Interrupt asks the CLI to stop the turn, as soon as it has begun.
func (s *session) Interrupt() error {
	s.mu.Lock()
	s.interrupted = true
	s.mu.Unlock()
	s.stopAgain()
	return nil
}

// stopAgain asks to stop a turn that was asked for and is known, unless it was told already.
func (s *session) stopAgain() {
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

func (s *session) stop(thread, turn string) {
	s.ask("turn/interrupt", map[string]string{"threadId": thread, "turnId": turn}, asked{turn: turn})
}

func (s *session) stopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// running is the thread's turn that is ours.
func (s *session) running() (turn string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnID
}

// Line takes what the CLI prints.
func (s *session) Line(raw []byte, t *agent.Turn) error {
	l, err := decode[line](raw, "line")
	if err != nil {
		return err
	}
	switch {
	case l.Method != "" && len(l.ID) > 0:
		return s.question(l, t)
	case l.Method != "":
		return s.notified(l, raw, t)
	case len(l.ID) > 0:
		return s.answered(l, t)
	}
	s.logf(t, "info", "%s", raw)
	return nil
}

// answered takes the answer to a request of ours.
func (s *session) answered(l line, t *agent.Turn) error {
	id, err := strconv.Atoi(string(l.ID))
	s.mu.Lock()
	was, ok := s.asked[id]
	delete(s.asked, id)
	s.mu.Unlock()
	if err != nil || !ok {
		return fmt.Errorf("an answer to a request that was not made: %s", l.ID)
	}
	if l.Error != nil {
		s.refused(was, l.Error, t)
		return nil
	}
	switch was.method {
	case "initialize":
		return s.greeted(l.Result, t)
	case "thread/start", "thread/resume":
		return s.begun(was.method == "thread/resume", l.Result, t)
	case "turn/start":
		r, err := decode[notification](l.Result, "turn/start")
		if err != nil {
			return err
		}
		s.taken(r.Turn.ID)
		if s.pending && !s.told {
			s.told = true
			s.written(t)
		}
	case "thread/backgroundTerminals/list":
		return s.terminate(was, l.Result)
	}
	return nil
}

// greeted looks at the version: `spool/0.169.0 (…)`.
func (s *session) greeted(result json.RawMessage, t *agent.Turn) error {
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

// begun takes the thread, and gives it the query that waits.
func (s *session) begun(resumed bool, result json.RawMessage, t *agent.Turn) error {
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
		}}}, asked{})
	}
	if s.query != nil {
		return s.start()
	}
	return nil
}

// taken notes the turn's id. It comes as an answer and as a notification, in no certain order.
func (s *session) taken(turn string) {
	s.mu.Lock()
	if s.pending && turn != "" {
		s.turnID = turn
	}
	s.mu.Unlock()
	s.stopAgain()
}

// refused takes an error as an answer.
func (s *session) refused(was asked, e *rpcError, t *agent.Turn) {
	err := fmt.Errorf("%s was refused: %s (code %d)", was.method, e.Message, e.Code)
	switch was.method {
	case "thread/resume":
		s.logf(t, "warn", "%v", err)
		s.lost, s.resume = lost(s.launch), ""
		if s.pending {
			s.reportLost(t)
		}
		s.begin()
	case "turn/interrupt":
		// It was not running yet, or not any more: turn/started asks again.
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
		s.end(runner.Ended{Outcome: runner.Failed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
	default: // initialize, thread/start: no thread, and none to come
		s.fail(err, t)
	}
}

// fail gives up on the process: its next query is for another one.
func (s *session) fail(err error, t *agent.Turn) {
	s.broken = err
	if s.pending {
		s.end(runner.Ended{Outcome: runner.Failed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
	}
}

// say records an event: now, or when the next turn begins.
func (s *session) say(t *agent.Turn, p events.Payload) {
	switch {
	case s.pending:
		t.Emit(events.MainConversation, p)
	case len(s.unsaid) < maxUnsaid:
		s.unsaid = append(s.unsaid, p)
	}
}

func (s *session) logf(t *agent.Turn, level, format string, args ...any) {
	s.say(t, events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)})
}
