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

// initialize sends the first request of the handshake. It offers neither files nor terminals: the agent works in the
// sandbox itself.
func (s *session) initialize() {
	// Send fails only if a value cannot be encoded, and these can.
	_ = s.sendInitialize(s.handleInitialized) //nolint:errcheck // see above
}

// sendInitialize sends the request initialize. done handles the answer.
func (s *session) sendInitialize(done handler) error {
	return s.call(sdk.AgentMethodInitialize, sdk.InitializeRequest{
		ProtocolVersion: sdk.ProtocolVersionNumber,
		ClientInfo:      &sdk.Implementation{Name: "spool", Version: "1"},
	}, done)
}

// handleInitialized handles the answer to initialize: it checks that the agent can be used, and opens a session, the earlier one or a copy of
// it. If the agent cannot be used, the process takes no query.
func (s *session) handleInitialized(m message, t *agent.Turn) error {
	if m.Error != nil {
		s.fail(t, "AGENT_PROTOCOL", "the agent refused to initialize: "+m.Error.Message)
		return nil
	}
	r, err := decode[sdk.InitializeResponse](m.Result, "answer to initialize")
	if err != nil {
		s.fail(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	if r.ProtocolVersion != sdk.ProtocolVersionNumber {
		s.fail(t, "AGENT_PROTOCOL", fmt.Sprintf("the agent speaks version %d of ACP, not version %d", r.ProtocolVersion, sdk.ProtocolVersionNumber))
		return nil
	}
	s.caps = r.AgentCapabilities
	if a := r.AgentInfo; s.d.Version != "" && (a == nil || a.Version != s.d.Version) {
		version := "an unknown version"
		if a != nil {
			version = a.Name + " " + a.Version
		}
		s.note(t, logEvent("warn", "the agent is %s; version %s was tested", version, s.d.Version))
	}
	if err := s.checkReachable(); err != nil {
		s.fail(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	switch {
	case s.fork == nil:
		return s.openSession(t)
	case !s.d.Forks && s.fork.Anchor == "":
		return s.openSession(t) // the sandbox has its own copy of the agent's records
	case !s.d.Forks:
		s.noteLostTranscript(t, "the agent cannot cut a conversation")
		return s.start()
	}
	s.awaitsCopy = true
	return s.openCopy(t)
}

// handleForked handles the agent's notice that it has forked the session. It ignores further notices: an agent of several processes sends
// one from each.
func (s *session) handleForked(f *Forked, t *agent.Turn) error {
	if s.fork == nil || s.forked != nil {
		return nil
	}
	s.forked = f
	return s.openCopy(t)
}

// openCopy opens the forked session, or a new one if the fork failed. It does nothing until both the answer to initialize and the notice of
// the fork have arrived.
func (s *session) openCopy(t *agent.Turn) error {
	switch {
	case !s.awaitsCopy || s.forked == nil:
		return nil
	case s.forked.Error != "":
		s.noteLostTranscript(t, s.forked.Error)
		return s.start()
	}
	s.resume = s.forked.Session
	return s.openSession(t)
}

// openSession requests the session s.resume, or a new one if that is "" or the agent cannot open earlier sessions.
func (s *session) openSession(t *agent.Turn) error {
	switch {
	case s.resume == "":
		return s.start()
	case s.caps.SessionCapabilities.Resume != nil:
		return s.call(sdk.AgentMethodSessionResume, sdk.ResumeSessionRequest{
			SessionId: sdk.SessionId(s.resume), Cwd: s.place.Workspace, McpServers: s.servers(),
		}, s.sessionResumed)
	case s.caps.LoadSession:
		s.loading = true
		return s.call(sdk.AgentMethodSessionLoad, s.loadRequest(sdk.SessionId(s.resume)), s.sessionResumed)
	}
	s.noteLostTranscript(t, "the agent cannot go on with a session")
	return s.start()
}

// loadRequest returns the parameters of session/load, with which an agent opens a session and repeats its conversation.
func (s *session) loadRequest(id sdk.SessionId) sdk.LoadSessionRequest {
	return sdk.LoadSessionRequest{SessionId: id, Cwd: s.place.Workspace, McpServers: s.servers()}
}

// start requests a new session. sessionStarted handles the answer.
func (s *session) start() error {
	return s.call(sdk.AgentMethodSessionNew, sdk.NewSessionRequest{Cwd: s.place.Workspace, McpServers: s.servers()}, s.sessionStarted)
}

// noteLostTranscript journals an event with code TRANSCRIPT_LOST: the agent's earlier session cannot be resumed, so the agent does not know the
// earlier turns.
func (s *session) noteLostTranscript(t *agent.Turn, why string) {
	s.note(t, events.Error{
		Code: "TRANSCRIPT_LOST", Message: fmt.Sprintf("session %.100s of the agent cannot be continued: %s; the agent does not know the earlier turns", s.resume, why),
	})
}

// openResponse is the answer to a request that opens a session.
type openResponse struct {
	SessionID sdk.SessionId          `json:"sessionId"`
	Config    []configOption         `json:"configOptions"`
	Models    *sdk.SessionModelState `json:"models"`
}

// configOption is an option of the session. Its values may be in groups.
type configOption struct {
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

// sessionStarted handles the answer to the request for a new session. If it is an error, the process takes no query.
func (s *session) sessionStarted(m message, t *agent.Turn) error {
	if m.Error != nil {
		s.fail(t, s.code(m.Error), "the agent opened no session: "+describeRequestError(m.Error))
		return nil
	}
	o, err := decode[openResponse](m.Result, "answer to session/new")
	if err == nil && o.SessionID == "" {
		err = fmt.Errorf("answer to session/new: sessionId is missing")
	}
	if err != nil {
		s.fail(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	return s.chooseModel(o, t)
}

// sessionResumed handles the answer to the request for the earlier session. If it is an error, a new session is requested.
func (s *session) sessionResumed(m message, t *agent.Turn) error {
	s.loading = false
	if m.Error != nil {
		s.noteLostTranscript(t, describeRequestError(m.Error))
		return s.start()
	}
	o, err := decode[openResponse](m.Result, "answer to session/resume")
	if err != nil {
		s.fail(t, "AGENT_PROTOCOL", err.Error())
		return nil
	}
	o.SessionID = sdk.SessionId(s.resume)
	return s.chooseModel(o, t)
}

// chooseModel sets s.id to the opened session, and requests the model of the launch in the way that the agent offers: as an option of the
// session or by session/set_model. Without such a request it ends the handshake.
func (s *session) chooseModel(o openResponse, t *agent.Turn) error {
	s.mu.Lock()
	s.id = o.SessionID
	s.mu.Unlock()
	if s.d.Model == "" {
		return s.handshakeDone(t)
	}
	for _, c := range o.Config {
		if c.Category != "model" && c.ID != "model" {
			continue
		}
		var current string
		if json.Unmarshal(c.Current, &current) == nil && current == s.d.Model {
			return s.handshakeDone(t)
		}
		if s.d.ModelSet && !slices.Contains(c.values(), s.d.Model) {
			return s.handshakeDone(t)
		}
		return s.setModel(c.values(), sdk.AgentMethodSessionSetConfigOption, sdk.SetSessionConfigOptionValueId{
			SessionId: s.id, ConfigId: sdk.SessionConfigId(c.ID), Value: sdk.SessionConfigValueId(s.d.Model),
		}, t)
	}
	if o.Models != nil {
		if string(o.Models.CurrentModelId) == s.d.Model {
			return s.handshakeDone(t)
		}
		var names []string
		for _, m := range o.Models.AvailableModels {
			names = append(names, string(m.ModelId))
		}
		if s.d.ModelSet && !slices.Contains(names, s.d.Model) {
			return s.handshakeDone(t)
		}
		return s.setModel(names, sdk.AgentMethodSessionSetModel, sdk.UnstableSetSessionModelRequest{SessionId: s.id, ModelId: sdk.UnstableModelId(s.d.Model)}, t)
	}
	if s.d.ModelSet {
		return s.handshakeDone(t)
	}
	s.d.Shown = "" // the model is unknown
	s.note(t, logEvent("warn", "the agent offers no choice of a model: %s is not chosen", s.d.Model))
	return s.handshakeDone(t)
}

// values returns the values that can be chosen, including those in groups.
func (c configOption) values() []string {
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

// maxNames is the number of models that an error message lists.
const maxNames = 20

// setModel sends the request that chooses the model, and ends the handshake after the answer. offered are the models that the agent lists,
// for the error message: the agent may know others.
func (s *session) setModel(offered []string, method string, params any, t *agent.Turn) error {
	return s.call(method, params, func(m message, t *agent.Turn) error {
		if m.Error != nil {
			if len(offered) > maxNames {
				offered = append(offered[:maxNames], "…")
			}
			s.fail(t, "MODEL_NOT_FOUND", fmt.Sprintf("the agent does not take the model %q (%s); it offers %s", s.d.Model, describeRequestError(m.Error), strings.Join(offered, ", ")))
			return nil
		}
		return s.handshakeDone(t)
	})
}

// handshakeDone ends the handshake and sends a query that waits for it.
func (s *session) handshakeDone(t *agent.Turn) error {
	s.ready = true
	s.note(t, s.transcriptWritten())
	if !s.pending {
		return nil
	}
	return s.ask(t)
}

// transcriptWritten returns the event with the path of the transcript.
func (s *session) transcriptWritten() events.TranscriptWritten {
	w := events.TranscriptWritten{AgentSessionID: string(s.id)}
	if s.d.Transcript != nil {
		w.Path = s.d.Transcript(string(s.id))
	}
	return w
}

// fail makes the process unusable: every later query is refused with the error. A query that waits fails at once.
func (s *session) fail(t *agent.Turn, code, message string) {
	s.broken = &runner.CommandError{Code: code, Message: message}
	if s.pending {
		s.finish(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}, t)
	}
}

// content returns the query as content blocks of the protocol. The error names the part of the query that the protocol or the agent cannot
// take.
func (s *session) content(q runner.Query) ([]sdk.ContentBlock, error) {
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
