package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Limits of what a command may carry.
const (
	MaxMessage  = 1 << 20  // bytes of a message's content
	MaxMetadata = 16 << 10 // bytes of metadata
	// MaxDuration is what fits into an unsigned 32-bit number of milliseconds: 49 days.
	MaxDuration = time.Duration(1<<32-1) * time.Millisecond
)

// DefaultAgent is the built-in agent definition that a session without an agent uses.
const DefaultAgent = "default"

// architectures by name; an alias stands for another.
var architectures = map[string]string{
	"claude-code": "claude-code", "claude-sdk": "claude-code", "codex": "codex", "opencode": "opencode",
	command.ArchitectureACP: command.ArchitectureACP, "spool": "spool",
}

func invalid(field, detail string) *command.Error {
	return &command.Error{Code: "INVALID_REQUEST", Field: field, Detail: detail}
}

func decode(c command.Command, into any) error {
	if err := json.Unmarshal(c.Body, into); err != nil {
		return invalid("body", fmt.Sprintf("the body of %s does not decode: %v", c.Type, err))
	}
	return nil
}

// created resolves what a session is made from.
func (h *Handler) created(b command.CreateSession) (events.SessionCreated, error) {
	out := events.SessionCreated{Agent: b.Agent, AgentVersion: "1", Metadata: b.Metadata}
	if out.Agent == "" {
		out.Agent = DefaultAgent
	}
	if out.Agent != DefaultAgent {
		return out, invalid("agent", fmt.Sprintf("there is no agent %.64q; the one agent is %q", b.Agent, DefaultAgent))
	}
	arch := b.Architecture
	if arch == "" {
		arch = "spool"
	}
	var known bool
	if out.Architecture, known = architectures[arch]; !known {
		return out, invalid("architecture", fmt.Sprintf("there is no architecture %.64q; there are claude-code (alias claude-sdk), codex, opencode, acp and spool", b.Architecture))
	}
	if out.Provider = b.Provider; out.Provider == "" {
		out.Provider = h.cfg.Providers[0]
	}
	if !slices.Contains(h.cfg.Providers, out.Provider) {
		return out, invalid("sandbox", fmt.Sprintf("there is no sandbox provider %.64q here; this installation offers %s", b.Provider, strings.Join(h.cfg.Providers, ", ")))
	}
	if err := errors.Join(command.CheckOptions(b.Options), command.CheckCommand(out.Architecture, b.Options.Command)); err != nil {
		return out, err
	}
	out.Options = h.options(b.Options)
	return out, checkMetadata(b.Metadata)
}

// options fills in the service's defaults.
func (h *Handler) options(o events.Options) events.Options {
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

// update merges changed options over the present ones. What is cleared is the service's default again.
func (h *Handler) update(b command.UpdateSession, l eventlog.Loaded, base session.Base) (session.Command, error) {
	o, err := command.Merge(l.Life.Options, b.Options, b.Clear)
	if err == nil && l.Life.Status != session.None {
		err = command.CheckCommand(l.Life.Architecture, o.Command)
	}
	return session.UpdateOptions{Base: base, Options: h.options(o), Metadata: b.Metadata}, err
}

func checkUpdate(b command.UpdateSession) error {
	if b.Options != nil {
		if err := command.CheckOptions(*b.Options); err != nil {
			return err
		}
	}
	if _, err := command.Merge(events.Options{}, nil, b.Clear); err != nil {
		return err
	}
	return checkMetadata(b.Metadata)
}

func post(c command.Command, b command.PostMessage, base session.Base, l eventlog.Loaded) session.Post {
	return session.Post{
		Base: base, ExecutionID: c.ExecutionID, Content: b.Content, Parts: b.Parts, Metadata: b.Metadata,
		Files: files(c, b.Files), Held: l.Run.Snapshot.Applied, ActiveEnded: l.View().ActiveEnded,
	}
}

func checkPost(c command.Command, b command.PostMessage) error {
	if err := checkFiles(c, b.Files); err != nil {
		return err
	}
	size, text := len(b.Content), b.Content
	for _, p := range b.Parts {
		size += len(p.Text) + len(p.Data)
		text += p.Text + p.Data
		if p.Type != "text" && p.Type != "image" {
			return invalid("content", fmt.Sprintf("a part has type %.64q; a part is text or image", p.Type))
		}
	}
	switch {
	case strings.TrimSpace(text) == "":
		return invalid("content", "the message is empty")
	case size > MaxMessage:
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Field: "content", Detail: fmt.Sprintf("the message has %d bytes; at most %d are taken", size, MaxMessage)}
	case !utf8.ValidString(text):
		return invalid("content", "the message is not valid UTF-8")
	}
	return checkMetadata(b.Metadata)
}

func checkMetadata(m json.RawMessage) error {
	if len(m) > MaxMetadata {
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Field: "metadata", Detail: fmt.Sprintf("the metadata has %d bytes; at most %d are taken", len(m), MaxMetadata)}
	}
	return nil
}
