package acp

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// startHandshake sends the first request of the handshake. The request offers neither files nor terminals, because the agent works in the sandbox
// itself.
func (s *session) startHandshake() {
	// Send fails only if a value cannot be encoded, and these can.
	_ = s.sendInitialize(s.handleInitializeAnswer) //nolint:errcheck // see above
}

// sendInitialize sends the request initialize. done handles the answer.
func (s *session) sendInitialize(done answerHandler) error {
	return s.sendRequest(sdk.AgentMethodInitialize, sdk.InitializeRequest{
		ProtocolVersion: sdk.ProtocolVersionNumber,
		ClientInfo:      &sdk.Implementation{Name: "spool", Version: "1"},
	}, done)
}

// handleInitializeAnswer handles the answer to initialize: it checks that the agent can be used, and opens a session: the earlier one, a copy of
// it, or a new one. If the agent cannot be used, the session refuses every query.
func (s *session) handleInitializeAnswer(m rpcMessage, t *agent.Turn) error {
	if m.Error != nil {
		s.refuseQueries(t, "AGENT_PROTOCOL", "the agent refused to initialize: "+m.Error.text())
		return nil
	}
	r, err := decode[sdk.InitializeResponse](m.Result, "answer to initialize")
	if err != nil {
		s.refuseQueries(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	if r.ProtocolVersion != sdk.ProtocolVersionNumber {
		s.refuseQueries(t, "AGENT_PROTOCOL", fmt.Sprintf("the agent speaks version %d of ACP, not version %d", r.ProtocolVersion, sdk.ProtocolVersionNumber))
		return nil
	}
	s.caps = r.AgentCapabilities
	if a := r.AgentInfo; s.d.Version != "" && (a == nil || a.Version != s.d.Version) {
		version := "an unknown version"
		if a != nil {
			version = a.Name + " " + a.Version
		}
		s.journalOrQueue(t, logEvent("warn", "the agent is %s; version %s was tested", version, s.d.Version))
	}
	if err := s.checkServersReachable(); err != nil {
		s.refuseQueries(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	switch {
	case s.fork == nil:
		return s.openSession(t)
	case !s.d.Forks && s.fork.Anchor == "":
		return s.openSession(t) // the sandbox has its own copy of the agent's records
	case !s.d.Forks:
		return s.loseConversation(t, "the agent cannot cut a conversation")
	}
	s.awaitsCopy = true
	return s.openForkedSession(t)
}

// handleForkResult handles the agent's notice that it has copied the session to fork. It ignores further notices: an agent of several processes
// sends one from each.
func (s *session) handleForkResult(f *ForkResult, t *agent.Turn) error {
	if s.fork == nil || s.forked != nil {
		return nil
	}
	s.forked = f
	return s.openForkedSession(t)
}

// openForkedSession opens the copy of the session to fork, or a new session if the copy failed. It does nothing until both the answer to initialize
// and the notice of the copy have arrived.
func (s *session) openForkedSession(t *agent.Turn) error {
	switch {
	case !s.awaitsCopy || s.forked == nil:
		return nil
	case s.forked.Error != "":
		return s.loseConversation(t, s.forked.Error)
	}
	s.resume = s.forked.Session
	return s.openSession(t)
}

// openSession requests that the agent open the session s.resume, or a new one if s.resume is "" or the agent cannot open earlier sessions.
func (s *session) openSession(t *agent.Turn) error {
	switch {
	case s.resume == "":
		return s.requestNewSession()
	case s.caps.SessionCapabilities.Resume != nil:
		return s.sendRequest(sdk.AgentMethodSessionResume, sdk.ResumeSessionRequest{
			SessionId: sdk.SessionId(s.resume), Cwd: s.place.Workspace, McpServers: s.sessionServers(),
		}, s.handleResumedSession)
	case s.caps.LoadSession:
		return s.requestLoad()
	}
	return s.loseConversation(t, "the agent cannot go on with a session")
}

// requestLoad sends session/load for the session s.resume.
func (s *session) requestLoad() error {
	s.loading = true
	return s.sendRequest(sdk.AgentMethodSessionLoad, s.loadSessionRequest(sdk.SessionId(s.resume)), s.handleLoadedSession)
}

// loadSessionRequest returns the parameters of session/load, at which an agent opens an earlier session and repeats its conversation.
func (s *session) loadSessionRequest(id sdk.SessionId) sdk.LoadSessionRequest {
	return sdk.LoadSessionRequest{SessionId: id, Cwd: s.place.Workspace, McpServers: s.sessionServers()}
}

// requestNewSession sends session/new. handleNewSession handles the answer.
func (s *session) requestNewSession() error {
	return s.sendRequest(sdk.AgentMethodSessionNew, sdk.NewSessionRequest{Cwd: s.place.Workspace, McpServers: s.sessionServers()}, s.handleNewSession)
}

// loseConversation is called when the agent cannot continue its earlier session. It requests a new session and journals the loss, if the launch
// allows that. Otherwise the session refuses every query.
func (s *session) loseConversation(t *agent.Turn, why string) error {
	why = fmt.Sprintf("session %.100s of the agent cannot be continued: %s", s.resume, why)
	if !s.continues {
		refusal := agent.LossRefusal(why)
		s.refuseQueries(t, refusal.Code, refusal.Message)
		return nil
	}
	s.journalOrQueue(t, agent.LossEvent(why))
	return s.requestNewSession()
}

// openSessionResult is the agent's answer to session/new or session/load.
type openSessionResult struct {
	SessionID sdk.SessionId          `json:"sessionId"`
	Config    []sessionOption        `json:"configOptions"`
	Models    *sdk.SessionModelState `json:"models"`
}

// sessionOption is a setting of the agent's session, such as the model, with the values that can be chosen. The values may be in groups.
type sessionOption struct {
	ID       string          `json:"id"`
	Category string          `json:"category"`
	Current  json.RawMessage `json:"currentValue"`
	Options  []struct {
		Value   string `json:"value"`
		Options []struct {
			Value string `json:"value"`
		} `json:"options"`
	} `json:"options"`
}

// handleNewSession handles the answer to session/new. If the answer is an error, the session refuses every query.
func (s *session) handleNewSession(m rpcMessage, t *agent.Turn) error {
	if m.Error != nil {
		s.refuseQueries(t, s.errorCode(m.Error), "the agent opened no session: "+m.Error.text())
		return nil
	}
	o, err := decode[openSessionResult](m.Result, "answer to session/new")
	if err == nil && o.SessionID == "" {
		err = fmt.Errorf("answer to session/new: sessionId is missing")
	}
	if err != nil {
		s.refuseQueries(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	return s.chooseModel(o, t)
}

// handleResumedSession handles the answer to session/resume. If the answer is an error, it requests the session by session/load, which some agents
// can although they refuse session/resume.
func (s *session) handleResumedSession(m rpcMessage, t *agent.Turn) error {
	if m.Error != nil && s.caps.LoadSession && !m.Error.needsLogin() {
		s.journalOrQueue(t, logEvent("info", "the agent does not resume session %.100s: %s; it is asked to load it", s.resume, m.Error.text()))
		return s.requestLoad()
	}
	return s.handleLoadedSession(m, t)
}

// handleLoadedSession handles the last answer to a request for the earlier session. If the answer is an error, the conversation is lost. So it is if
// the agent has loaded the session and repeats no message of it: some agents make an empty session for an id that they do not know. Agents may
// repeat messages after the answer, so handleLoadedSession sends a ping first.
func (s *session) handleLoadedSession(m rpcMessage, t *agent.Turn) error {
	loaded := s.loading
	switch {
	case m.Error != nil && m.Error.needsLogin():
		s.refuseQueries(t, s.errorCode(m.Error), "the agent opened no session: "+m.Error.text())
		return nil
	case m.Error != nil:
		s.loading = false
		return s.loseConversation(t, m.Error.text())
	}
	o, err := decode[openSessionResult](m.Result, "answer to session/load")
	if err != nil {
		s.refuseQueries(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	o.SessionID = sdk.SessionId(s.resume)
	if !loaded {
		return s.chooseModel(o, t)
	}
	return s.sendPing(func(_ rpcMessage, t *agent.Turn) error {
		if s.loading = false; !s.repeated {
			return s.loseConversation(t, "the agent loaded it without a message")
		}
		return s.chooseModel(o, t)
	})
}

// chooseModel sets s.id to the opened session, and requests the model of the launch in the way that the agent offers: as an option of the session
// or by session/set_model. If there is no model to request, it ends the handshake.
func (s *session) chooseModel(o openSessionResult, t *agent.Turn) error {
	s.mu.Lock()
	s.id = o.SessionID
	s.mu.Unlock()
	if s.d.Model == "" {
		return s.finishHandshake(t)
	}
	for _, c := range o.Config {
		if c.Category != "model" && c.ID != "model" {
			continue
		}
		var current string
		if json.Unmarshal(c.Current, &current) == nil && current == s.d.Model {
			return s.finishHandshake(t)
		}
		if s.d.ModelSet && !slices.Contains(c.selectableValues(), s.d.Model) {
			return s.finishHandshake(t)
		}
		return s.requestModel(c.selectableValues(), sdk.AgentMethodSessionSetConfigOption, sdk.SetSessionConfigOptionValueId{
			SessionId: s.id, ConfigId: sdk.SessionConfigId(c.ID), Value: sdk.SessionConfigValueId(s.d.Model),
		}, t)
	}
	if o.Models != nil {
		if string(o.Models.CurrentModelId) == s.d.Model {
			return s.finishHandshake(t)
		}
		var names []string
		for _, m := range o.Models.AvailableModels {
			names = append(names, string(m.ModelId))
		}
		if s.d.ModelSet && !slices.Contains(names, s.d.Model) {
			return s.finishHandshake(t)
		}
		return s.requestModel(names, sdk.AgentMethodSessionSetModel, sdk.UnstableSetSessionModelRequest{SessionId: s.id, ModelId: sdk.UnstableModelId(s.d.Model)}, t)
	}
	if s.d.ModelSet {
		return s.finishHandshake(t)
	}
	s.d.Shown = "" // the model is unknown
	s.journalOrQueue(t, logEvent("warn", "the agent offers no choice of a model: %s is not chosen", s.d.Model))
	return s.finishHandshake(t)
}

// selectableValues returns the values of the option that can be chosen, including those in groups.
func (c sessionOption) selectableValues() []string {
	var all []string
	for _, o := range c.Options {
		if o.Value != "" {
			all = append(all, o.Value)
		}
		for _, in := range o.Options {
			all = append(all, in.Value)
		}
	}
	return all
}

// maxListedModels is the maximum number of models that the error message about an unknown model lists.
const maxListedModels = 20

// requestModel sends the request that chooses the model, and ends the handshake when the answer arrives. The error message lists the models in
// offered, which are not all: the agent may know others.
func (s *session) requestModel(offered []string, method string, params any, t *agent.Turn) error {
	return s.sendRequest(method, params, func(m rpcMessage, t *agent.Turn) error {
		if m.Error != nil {
			if len(offered) > maxListedModels {
				offered = append(offered[:maxListedModels], "…")
			}
			s.refuseQueries(t, "MODEL_NOT_FOUND", fmt.Sprintf("the agent does not take the model %q (%s); it offers %s", s.d.Model, m.Error.text(), strings.Join(offered, ", ")))
			return nil
		}
		return s.finishHandshake(t)
	})
}

// finishHandshake marks the handshake as complete, and sends the query that waits for it, if there is one.
func (s *session) finishHandshake(t *agent.Turn) error {
	s.ready = true
	t.SetAlarm(0, nil)
	s.journalOrQueue(t, s.transcriptEvent())
	if !s.pending {
		return nil
	}
	return s.sendPrompt(t)
}

// transcriptEvent returns the event transcript_written with the session's id and the path of the transcript.
func (s *session) transcriptEvent() events.TranscriptWritten {
	w := events.TranscriptWritten{AgentSessionID: string(s.id), Volatile: s.caps.SessionCapabilities.Resume == nil && !s.caps.LoadSession}
	if s.d.Transcript != nil {
		w.Path = s.d.Transcript(string(s.id))
	}
	return w
}

// refuseQueries makes the session refuse every later query with the error code and message. A turn that waits for the handshake fails at once.
func (s *session) refuseQueries(t *agent.Turn, code, message string) {
	s.broken = &runner.CommandError{Code: code, Message: message}
	if s.pending {
		s.finishTurn(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}, t)
	}
}

// promptContent converts the query to content blocks of the protocol. The error names the part of the query that the protocol or the agent cannot
// take.
func (s *session) promptContent(q runner.Query) ([]sdk.ContentBlock, error) {
	var blocks []sdk.ContentBlock
	if q.Content != "" {
		blocks = append(blocks, sdk.TextBlock(q.Content))
	}
	for i, p := range q.Parts {
		switch p.Type {
		case "text":
			blocks = append(blocks, sdk.TextBlock(p.Text))
		case "image":
			if !strings.HasPrefix(p.MediaType, "image/") {
				return nil, fmt.Errorf("query.parts[%d].mediaType: %q is not an image type", i, p.MediaType)
			}
			if _, err := base64.StdEncoding.DecodeString(p.Data); err != nil || p.Data == "" {
				return nil, fmt.Errorf("query.parts[%d].data: is not base64", i)
			}
			if s.ready && !s.caps.PromptCapabilities.Image {
				return nil, fmt.Errorf("query.parts[%d]: the agent does not accept images", i)
			}
			blocks = append(blocks, sdk.ImageBlock(p.Data, p.MediaType))
		default:
			return nil, fmt.Errorf("query.parts[%d].type: %q is not text or image", i, p.Type)
		}
	}
	return blocks, nil
}
