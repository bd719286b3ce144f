package claudecode

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// session implements agent.Session for one process of Claude Code.
type session struct {
	place  agent.Folders
	launch agent.Launch
	scope  policyScope // scope of the policy
	in     agent.Stdin
	now    func() time.Time
	lost   string // why the earlier session cannot be resumed, until that is reported

	mu          sync.Mutex // guards the fields below, which Interrupt shares with HandleLine
	requests    int
	interrupts  map[string]bool // unanswered requests, by id
	interrupted bool            // the turn is to stop
	heard       bool            // the CLI accepted the interrupt

	// State of the process.
	agentSession string
	model        string
	version      string            // as the process reported it
	spent        usageTotal        // at the end of the previous turn
	tasks        []events.PlanItem // of the tools TaskCreate and TaskUpdate
	plan         string            // path of the plan that the agent wrote last, in plan mode

	subagents map[string]subagentInfo // sub-agents that the process has started, by the CLI's id

	// State of the turn.
	pending bool // a query runs
	foreign bool // a turn runs that the CLI began by itself
	taken   bool // the query was acknowledged
	turn    turnState
}

// turnState is the part of a session's state that is reset at the beginning of each turn.
type turnState struct {
	conversations map[string]*conversation    // by id, "" for the agent itself
	calls         map[callKey]*runningCall    // running tools
	held          []heldHook                  // calls of sub-agents that wait until they are journaled
	early         map[string][]transcriptLine // lines of transcripts of sub-agents that wait for their call, by the CLI's id
	earlyBytes    int                         // size of early
	skills        []skillLoad                 // skills whose folder the CLI has not printed yet
	maxDepth      uint32                      // levels of sub-agents that may be started; 0 for no limit
	seen          events.Usage                // the sum over the messages
	model         string                      // the model that answered last
	why           string                      // why the CLI answered in place of the model
	last          string                      // uuid of the last line of an answer in the agent's own conversation
}

// callKey identifies a tool call: models may give a call an id that a call in another conversation has.
type callKey struct {
	conversation string
	id           string // the agent's id of the call
}

// runningCall is a tool call that has no result yet.
type runningCall struct {
	depth   uint32 // of the conversation, see conversation.depth
	name    string
	input   json.RawMessage
	started time.Time
}

// newSession returns a session whose process gets its lines from in. It sends nothing.
func newSession(place agent.Folders, in agent.Stdin, now func() time.Time) *session {
	return &session{
		place: place, scope: policyScope{root: place.Workspace}, in: in, now: now, interrupts: map[string]bool{},
		subagents: map[string]subagentInfo{}, turn: newTurnState(),
	}
}

// newTurnState returns the state for a new turn.
func newTurnState() turnState {
	return turnState{
		conversations: map[string]*conversation{"": {id: events.MainConversation, begun: true}},
		calls:         map[callKey]*runningCall{}, early: map[string][]transcriptLine{},
	}
}

// handshakeContent is the part of the agent's definition that is sent to the CLI before any query.
type handshakeContent struct {
	Prompt    string              `json:"prompt"` // added to the CLI's system prompt
	Subagents map[string]subagent `json:"subagents"`
}

// newHandshakeContent returns the handshakeContent for the agent of a launch.
func newHandshakeContent(l agent.Launch) handshakeContent {
	return handshakeContent{Prompt: l.SystemPrompt, Subagents: subagents(l)}
}

// hasContent reports whether the handshake has a prompt or sub-agents.
func (h handshakeContent) hasContent() bool { return h.Prompt != "" || len(h.Subagents) > 0 }

// encode returns the content as JSON, for a digest. Equal contents have equal bytes.
func (h handshakeContent) encode() []byte {
	raw, err := json.Marshal(h)
	if err != nil {
		return nil // strings always marshal
	}
	return raw
}

// sendInitialize sends the control request initialize with the content h. It registers the hook callHookID, which the CLI
// calls before every tool call.
func (s *session) sendInitialize(h handshakeContent) {
	request := map[string]any{"subtype": "initialize", "hooks": map[string]any{
		"PreToolUse": []any{map[string]any{"hookCallbackIds": []string{callHookID}, "timeout": callHookTimeout}},
	}}
	if h.Prompt != "" {
		request["appendSystemPrompt"] = h.Prompt
	}
	if len(h.Subagents) > 0 {
		request["agents"] = h.Subagents
	}
	// These values can always be encoded.
	_, _ = s.sendControlRequest(request) //nolint:errcheck // see above
}

// sendControlRequest sends a control_request to the CLI and returns the id of the request. It remembers interrupts
// until they are answered.
func (s *session) sendControlRequest(request map[string]any) (string, error) {
	s.mu.Lock()
	s.requests++
	id := "spool-" + strconv.Itoa(s.requests)
	if request["subtype"] == "interrupt" {
		s.interrupts[id] = true
	}
	s.mu.Unlock()
	return id, s.in.Send(controlRequest{Type: "control_request", RequestID: id, Request: request})
}

// BeginTurn begins a turn and sends the query. If the earlier conversation is lost, it journals that, or refuses the query.
func (s *session) BeginTurn(q runner.Query, t *agent.Turn) error {
	content, err := userContent(q)
	if err != nil {
		return err
	}
	if s.lost != "" {
		if refusal := agent.ReportLoss(t, q.ContinueAfterLoss, s.lost); refusal != nil {
			return refusal
		}
		s.lost = ""
	}
	s.mu.Lock()
	s.interrupted, s.heard = false, false
	s.mu.Unlock()
	s.turn, s.pending, s.taken = newTurnState(), true, false
	s.turn.maxDepth = q.SubagentDepth
	return s.in.Send(userLine{Type: "user", Message: userMessage{Role: "user", Content: content}})
}

// imageTypes are the media types that the model's API accepts.
var imageTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp"}

// userContent converts a query to the content of a user message: a string, or for a query with parts a list of content
// blocks of the Messages API. The error names the part that the API cannot take.
func userContent(q runner.Query) (any, error) {
	if len(q.Parts) == 0 {
		return q.Content, nil
	}
	var parts []any
	if q.Content != "" {
		parts = append(parts, map[string]any{"type": "text", "text": q.Content})
	}
	for i, p := range q.Parts {
		switch p.Type {
		case "text":
			parts = append(parts, map[string]any{"type": "text", "text": p.Text})
		case "image":
			if !slices.Contains(imageTypes, p.MediaType) {
				return nil, fmt.Errorf("query.parts[%d].mediaType: %q is not one of %v", i, p.MediaType, imageTypes)
			}
			if _, err := base64.StdEncoding.DecodeString(p.Data); err != nil || p.Data == "" {
				return nil, fmt.Errorf("query.parts[%d].data: is not base64", i)
			}
			parts = append(parts, map[string]any{
				"type": "image", "source": map[string]any{"type": "base64", "media_type": p.MediaType, "data": p.Data},
			})
		default:
			return nil, fmt.Errorf("query.parts[%d].type: %q is not text or image", i, p.Type)
		}
	}
	return parts, nil
}

// Interrupt asks the CLI to stop the turn.
func (s *session) Interrupt() error {
	s.mu.Lock()
	s.interrupted = true
	s.mu.Unlock()
	_, err := s.sendControlRequest(map[string]any{"subtype": "interrupt"})
	return err
}

// HandleLine handles a line that the CLI's process printed.
func (s *session) HandleLine(raw []byte, t *agent.Turn) error {
	l, err := decode[outputLine](raw, "line")
	if err != nil {
		return err
	}
	if l.isOfSubagent() {
		return nil
	}
	switch l.Type {
	case "transcript_mirror":
		return s.handleTranscriptLines(l, t)
	case "stream_event":
		return s.handleStreamEvent(l, t)
	case "assistant":
		return s.handleAssistantLine(l, t)
	case "user":
		return s.handleUserLine(l, t)
	case "result":
		return s.handleResult(l, raw, t)
	case "system":
		return s.handleSystem(l, raw, t)
	case "control_request":
		return s.handleControlRequest(l, t)
	case "control_response":
		return s.handleControlResponse(l, t)
	case "control_cancel_request":
		journalLogf(t, "info", "the agent withdrew request %s", l.RequestID)
		t.WithdrawRequest(l.RequestID)
		s.turn.held = slices.DeleteFunc(s.turn.held, func(h heldHook) bool { return h.request == l.RequestID })
	case "rate_limit_event":
		journalLogf(t, "info", "rate limit: %s", raw)
	case "keep_alive", "tool_progress":
		// These lines only show that the process is alive.
	default:
		journalLogf(t, "info", "%s", raw)
	}
	return nil
}

// handleControlResponse handles the CLI's answer to a control request of this session.
func (s *session) handleControlResponse(l outputLine, t *agent.Turn) error {
	a, err := decode[cliResponse](l.Response, "control_response")
	if err != nil {
		return err
	}
	s.mu.Lock()
	if s.interrupts[a.RequestID] {
		delete(s.interrupts, a.RequestID)
		s.heard = a.Subtype == "success"
	}
	s.mu.Unlock()
	s.storeAnnotations(a)
	if a.Subtype != "success" {
		t.Emit(events.MainConversation, events.Error{Code: "AGENT_PROTOCOL", Message: "the agent refused a request: " + a.Error})
	}
	return nil
}

// repeatInterrupt sends the interrupt again. It is called when an answer of the model begins although the CLI has
// accepted an interrupt: the CLI had not begun the turn when it accepted it.
func (s *session) repeatInterrupt() error {
	s.mu.Lock()
	again := s.interrupted && s.heard
	s.heard = false
	s.mu.Unlock()
	if !again {
		return nil
	}
	return s.Interrupt()
}

// isInterrupted reports whether the running turn was asked to stop.
func (s *session) isInterrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.interrupted
}

// journalLogf journals a formatted log event in the turn t.
func journalLogf(t *agent.Turn, level, format string, args ...any) {
	t.Emit(events.MainConversation, events.Log{Level: level, Stream: "stdout", Message: fmt.Sprintf(format, args...)})
}
