package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/permission"
)

// Limits of the contents of a command.
const (
	// MaxMessageBytes is the maximum size of a message's content, in bytes.
	MaxMessageBytes = 1 << 20
	// MaxMetadataBytes is the maximum size of a session's or message's metadata as JSON, in bytes.
	MaxMetadataBytes = 16 << 10
	// MaxDuration is the largest duration that fits into an unsigned 32-bit number of milliseconds, 49 days.
	MaxDuration = time.Duration(1<<32-1) * time.Millisecond
)

// DefaultAgent is the built-in agent definition that a session without an agent uses.
const DefaultAgent = "default"

// invalidFieldError returns the refusal of a command with an invalid field. detail is the message for the client.
func invalidFieldError(field, detail string) *command.Error {
	return &command.Error{Code: "INVALID_REQUEST", Field: field, Detail: detail}
}

// decodeBody decodes the body of a command, which is JSON. The error is a refusal.
func decodeBody(c command.Command, into any) error {
	if err := json.Unmarshal(c.Body, into); err != nil {
		return invalidFieldError("body", fmt.Sprintf("the body of %s does not decode: %v", c.Type, err))
	}
	return nil
}

// resolveSession returns the session_created event of a new session, with its references resolved.
func (h *Handler) resolveSession(ctx context.Context, c command.Command, b command.CreateSession) (events.SessionCreated, error) {
	out := events.SessionCreated{Metadata: b.Metadata}
	agent, err := h.pinAgent(ctx, c, b, &out)
	if err != nil {
		return out, err
	}
	if b.Transcript != nil && agent == nil {
		b.Architecture = cmp.Or(b.Architecture, b.Transcript.Architecture)
	}
	if out.Architecture, err = resolveArchitecture(b.Architecture, agent); err != nil {
		return out, err
	}
	if out.Transcript = b.Transcript; out.Transcript != nil {
		if err := checkTranscript(c, *out.Transcript, out.Architecture); err != nil {
			return out, err
		}
	}
	if out.Provider = b.Provider; out.Provider == "" {
		out.Provider = h.cfg.Providers[0]
	}
	if !slices.Contains(h.cfg.Providers, out.Provider) {
		return out, invalidFieldError("sandbox", fmt.Sprintf("there is no sandbox provider %.64q here; this installation offers %s", b.Provider, strings.Join(h.cfg.Providers, ", ")))
	}
	if agent != nil && agent.Limits.Turns > 0 && !definition.EnforcesTurnLimit(out.Architecture) && !isIsolated(out.Provider) {
		return out, invalidFieldError("sandbox", fmt.Sprintf("limits.turns of an agent of architecture %s needs the egress proxy of the providers docker and modal; provider %s has none", out.Architecture, out.Provider))
	}
	options := inheritOptions(b.Options, agent)
	if err := errors.Join(command.CheckOptions(options), command.CheckCommand(out.Architecture, options.Command), command.CheckModelProvider(out.Architecture, options.ModelProvider), command.CheckModelSettings(out.Architecture, options)); err != nil {
		return out, err
	}
	if err := h.checkSessionImages(out.Provider, options.Image, agent); err != nil {
		return out, err
	}
	if options.HostPath, err = h.resolveHostPath(options.HostPath, b, out.Provider, agent); err != nil {
		return out, err
	}
	out.Options = h.withDefaultOptions(options)
	return out, checkMetadata(b.Metadata)
}

// checkTranscript refuses a new session with a transcript that its agent cannot continue.
func checkTranscript(c command.Command, t events.Transcript, architecture string) error {
	if t.Object != command.TranscriptObject(c.Tenant, c.SessionID) {
		return invalidFieldError("transcript", fmt.Sprintf("%.100q is not a transcript of the session", t.Object))
	}
	if t.Architecture != architecture {
		return &command.Error{Code: command.CodeTranscriptMismatch, Field: "transcript", Detail: fmt.Sprintf("the transcript is of %s, but the session is of %s: choose an agent of the architecture %[1]s, or leave agent and architecture out", t.Architecture, architecture)}
	}
	return nil
}

// resolveArchitecture returns the architecture of a new session: that of the agent or, without an agent, the requested
// one. It returns a refusal if the architecture is unknown, or if the request and the agent have different ones.
func resolveArchitecture(asked string, agent *events.AgentSpec) (string, error) {
	name := cmp.Or(asked, architecture.Spool)
	if agent != nil {
		name = cmp.Or(asked, agent.Architecture)
	}
	known, ok := architecture.Canonical(name)
	if !ok {
		return "", invalidFieldError("architecture", fmt.Sprintf("unknown architecture %.64q; must be one of %s", asked, architecture.FormatNames()))
	}
	if agent == nil {
		return known, nil
	}
	if of, _ := architecture.Canonical(agent.Architecture); known != of {
		return "", invalidFieldError("architecture", fmt.Sprintf("the agent is made for %s; leave architecture out", agent.Architecture))
	}
	return known, nil
}

// inheritOptions returns session options in which the options that are not set have the values of the agent, and the
// allowed hosts include those of the agent.
func inheritOptions(o events.Options, agent *events.AgentSpec) events.Options {
	if agent == nil {
		return o
	}
	o.Model, o.ModelProvider, o.Image = cmp.Or(o.Model, agent.Model), cmp.Or(o.ModelProvider, agent.ModelProvider), cmp.Or(o.Image, agent.Image)
	o.TurnLimitMs = cmp.Or(o.TurnLimitMs, agent.Limits.TimeMs)
	o.Budget = cmp.Or(o.Budget, agent.Limits.Session)
	if len(o.Command) == 0 {
		o.Command = agent.Command
	}
	if s := o.ModelSettings; s.Preset == "" && len(s.Env)+len(s.Args) == 0 {
		o.ModelSettings = agent.ModelSettings
	}
	for _, host := range agent.Egress {
		if !slices.Contains(o.Egress, host) {
			o.Egress = append(slices.Clone(o.Egress), host)
		}
	}
	return o
}

// withDefaultOptions returns session options in which the options that are not set have the defaults of the service.
func (h *Handler) withDefaultOptions(o events.Options) events.Options {
	for _, f := range []struct {
		ms    *uint32
		unset time.Duration
	}{
		{&o.IdleTimeoutMs, h.cfg.IdleTimeout}, {&o.TurnLimitMs, h.cfg.TurnLimit}, {&o.SessionLimitMs, h.cfg.SessionLimit},
		{&o.SyncIntervalMs, h.cfg.SyncInterval}, {&o.HealthIntervalMs, h.cfg.HealthInterval}, {&o.SandboxMaxAgeMs, h.cfg.SandboxMaxAge},
	} {
		if *f.ms == 0 {
			*f.ms = uint32(f.unset.Milliseconds())
		}
	}
	return o
}

// updateCommand returns the command that changes a session's options: the current ones, merged with the changed ones. A
// cleared option gets the service's default again.
func (h *Handler) updateCommand(b command.UpdateSession, l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
	o, err := command.MergeOptions(l.Life.Options, b.Options, b.Clear)
	if err == nil && b.Options != nil { // the session's image was allowed when the session was created, and an executor checks it again
		err = h.checkSessionImages(l.Life.Provider, b.Options.Image, nil)
	}
	if err == nil && l.Life.Status != session.None {
		err = errors.Join(command.CheckCommand(l.Life.Architecture, o.Command), command.CheckModelProvider(l.Life.Architecture, o.ModelProvider), command.CheckModelSettings(l.Life.Architecture, o))
	}
	return session.UpdateOptions{CommandBase: base, Options: h.withDefaultOptions(o), Metadata: b.Metadata}, err
}

// checkUpdate refuses a command that changes a session's options to invalid values.
func checkUpdate(b command.UpdateSession) error {
	if b.Options != nil {
		if err := errors.Join(command.CheckFixedOptions(b.Options), command.CheckOptions(*b.Options)); err != nil {
			return err
		}
	}
	if _, err := command.MergeOptions(events.Options{}, nil, b.Clear); err != nil {
		return err
	}
	return checkMetadata(b.Metadata)
}

// postCommand returns the command that posts a message to a loaded session.
func postCommand(c command.Command, b command.PostMessage, base session.CommandBase, l *eventlog.SessionState) session.PostQuery {
	return session.PostQuery{
		CommandBase: base, ExecutionID: c.ExecutionID, Content: b.Content, Parts: b.Parts, Metadata: b.Metadata,
		Files: sessionFiles(c, b.Files), Held: l.Run.Snapshot.Applied, ActiveEnded: l.RunView().ActiveEnded, Environment: b.Environment,
		Permissions: b.Permissions,
	}
}

// checkMessage refuses a command that posts an invalid message to a session.
func checkMessage(c command.Command, b command.PostMessage) error {
	if err := errors.Join(checkFiles(c, b.Files), checkVariables(b.Environment)); err != nil {
		return err
	}
	if wrong := permission.CheckExecution(b.Permissions); len(wrong) > 0 {
		return invalidFieldError(wrong[0].Field, wrong[0].Detail)
	}
	size, text := len(b.Content), b.Content
	for _, p := range b.Parts {
		size += len(p.Text) + len(p.Data)
		text += p.Text + p.Data
		if p.Type != "text" && p.Type != "image" {
			return invalidFieldError("content", fmt.Sprintf("a part has type %.64q; a part is text or image", p.Type))
		}
	}
	switch {
	case strings.TrimSpace(text) == "":
		return invalidFieldError("content", "the message is empty")
	case size > MaxMessageBytes:
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Field: "content", Detail: fmt.Sprintf("the message has %d bytes; the limit is %d", size, MaxMessageBytes)}
	case !utf8.ValidString(text):
		return invalidFieldError("content", "the message is not valid UTF-8")
	}
	return checkMetadata(b.Metadata)
}

// maxVariables is the maximum number of variables that a message may set.
const maxVariables = 256

// checkVariables refuses variables with invalid names, and secrets whose values are not encrypted.
func checkVariables(list map[string]events.Variable) error {
	if len(list) > maxVariables {
		return invalidFieldError("environment", fmt.Sprintf("has %d variables; the limit is %d", len(list), maxVariables))
	}
	for _, name := range slices.Sorted(maps.Keys(list)) {
		if err := layers.CheckVariableName(name); err != nil {
			return invalidFieldError("environment."+name, err.Error())
		}
		if v := list[name]; v.Secret != (v.Sealed != "") || v.Secret && v.Value != "" {
			return invalidFieldError("environment."+name, "a secret must have a sealed value only, and another variable a plain value only")
		}
	}
	return nil
}

// checkMetadata refuses metadata of more than MaxMetadataBytes.
func checkMetadata(m json.RawMessage) error {
	if len(m) > MaxMetadataBytes {
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Field: "metadata", Detail: fmt.Sprintf("the metadata has %d bytes; the limit is %d", len(m), MaxMetadataBytes)}
	}
	return nil
}
