// Package command carries out the commands of gateways about skills: it checks and stores ZIPs, decides, appends, and
// answers. Every command has an id, so that a redelivery changes nothing and gets the same answer as the first
// delivery.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/skill"
)

// The codes of refusals that package skill does not define.
const (
	codeInvalid  = "INVALID_REQUEST"
	codeNotFound = "SKILL_NOT_FOUND"
	codeUpload   = "SKILL_UPLOAD_MISSING"
)

// Config configures a Handler. Every field is required.
type Config struct {
	Entries eventlog.Catalogue
	NATS    *nats.Conn
	Now     func() time.Time
	Logger  *slog.Logger
	Service string // the service and its copy, recorded as the writer in commits
	Scratch string // the folder that holds ZIPs while they are checked

	// Done is called after each command with its type, its outcome (ok, a refusal's code, or retried) and the time that it took.
	Done func(typ, outcome string, took time.Duration)
	// Kept is called after each ZIP that was stored.
	Kept func()
}

// Handler carries out the commands that concern skills.
type Handler struct {
	cfg    Config
	keeper keeper
}

// New returns a Handler. Use must be called before the first command.
func New(cfg Config) *Handler { return &Handler{cfg: cfg} }

// Use sets the store in which the Handler keeps the ZIPs of skills. It must be called before Handle.
func (h *Handler) Use(store Store) { h.keeper.store = store }

// Handle is the bus handler for COMMANDS.
func (h *Handler) Handle(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	var c command.Command
	if err := json.Unmarshal(msg.Payload, &c); err != nil {
		return bus.Poison(fmt.Errorf("decode command: %w", err))
	}
	if err := errors.Join(events.CheckTenant("tenant", c.Tenant), events.CheckID("id", events.KindCommand, c.ID)); err != nil {
		return bus.Poison(err)
	}
	c.Actor = c.Actor.WrittenBy(h.cfg.Service)
	began := time.Now()
	answer, err := h.do(ctx, c)
	outcome := "ok"
	defer func() {
		took := time.Since(began)
		h.cfg.Done(typeLabel(c.Type), outcome, took)
		attrs := []any{"command", c.ID, "type", typeLabel(c.Type), "tenant", c.Tenant, "outcome", outcome, "took", took}
		if answer.Ref != nil {
			attrs = append(attrs, "skill", answer.Ref.String())
		}
		h.cfg.Logger.Debug("command", attrs...)
	}()
	if refused := refusal(err); refused != nil {
		answer, outcome = command.Answer{Error: refused}, refused.Code
	} else if err != nil {
		outcome = "retried"
		return bus.Transient(err)
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return bus.Poison(fmt.Errorf("encode answer: %w", err))
	}
	return bus.Reply(h.cfg.NATS, msg, bus.Answer{Payload: body})
}

// refusal returns the answer to the client for an error that another attempt cannot change; nil for other errors.
func refusal(err error) *command.Error {
	var said *command.Error
	var zip *skill.Error
	var decided *versions.Error
	var none *eventlog.UnknownVersionError
	switch {
	case errors.As(err, &said):
		return said
	case errors.As(err, &zip):
		return &command.Error{Code: zip.Code, Field: zip.Field, Detail: zip.Message()}
	case errors.As(err, &decided) && decided.Code == versions.CodeNotFound:
		return &command.Error{Code: codeNotFound, Field: decided.Field, Detail: decided.Detail}
	case errors.As(err, &decided):
		return &command.Error{Code: decided.Code, Field: decided.Field, Detail: decided.Detail}
	case errors.As(err, &none):
		return notFound(none.Ref)
	case errors.Is(err, eventlog.ErrTooLarge):
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Detail: "the request does not fit into one commit of the log; send less at once"}
	case errors.Is(err, eventlog.ErrFull):
		return &command.Error{Code: "UNAVAILABLE", Detail: "the log is at its limit and refuses writes; nothing was stored"}
	}
	return nil
}

func invalid(field, detail string) *command.Error {
	return &command.Error{Code: codeInvalid, Field: field, Detail: detail}
}

func notFound(ref events.Reference) *command.Error {
	if ref.Version == "" {
		return &command.Error{Code: codeNotFound, Field: "slug", Detail: fmt.Sprintf("there is no skill %s", ref)}
	}
	return &command.Error{Code: codeNotFound, Field: "version", Detail: fmt.Sprintf("there is no skill %s, or no such version of it", ref)}
}

// do carries out a command of any type.
func (h *Handler) do(ctx context.Context, c command.Command) (command.Answer, error) {
	switch c.Type {
	case command.TypePushSkill:
		return h.push(ctx, c)
	case command.TypeTagSkill:
		return h.tag(ctx, c)
	case command.TypeRemoveSkill:
		return h.remove(ctx, c)
	}
	return command.Answer{}, invalid("type", fmt.Sprintf("there is no command %.64q of skills", c.Type))
}

func decode(c command.Command, into any) error {
	err := json.Unmarshal(c.Body, into)
	var ref *events.ReferenceError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ref):
		return badReference(ref)
	}
	return invalid("body", fmt.Sprintf("the body of %s does not decode: %v", c.Type, err))
}

// checkReference refuses an invalid reference.
func checkReference(ref events.Reference) error {
	var bad *events.ReferenceError
	switch err := ref.Check(); {
	case err == nil:
		return nil
	case errors.As(err, &bad):
		return badReference(bad)
	default:
		return invalid("ref", err.Error())
	}
}

// badReference converts the error of an invalid reference to a refusal.
func badReference(bad *events.ReferenceError) error {
	if bad.Field == "" {
		return invalid("ref", bad.Detail)
	}
	return invalid(bad.Field, bad.Detail)
}

// decider returns the events that a command appends, given the present state of a catalogue entry.
type decider func(e eventlog.CatalogueEntry, meta events.CommandMeta) ([]events.Event, error)

// change carries out a command on an entry. It returns the entry before and after the command.
func (h *Handler) change(ctx context.Context, c command.Command, ref events.Reference, decide decider) (before, after eventlog.CatalogueEntry, err error) {
	subject := ref.Subject(events.Skill, c.Tenant)
	err = eventlog.RetryOnConflict(func() error {
		e, err := h.cfg.Entries.Load(ctx, subject, eventlog.LeaderOnly)
		before, after = e, e
		if err != nil {
			return err
		}
		if done, err := h.cfg.Entries.HasCommand(ctx, e, c.ID); done || err != nil {
			return err
		}
		list, err := decide(e, events.CommandMeta{CommandID: c.ID, Now: h.cfg.Now()})
		if err != nil || len(list) == 0 {
			return err
		}
		return h.cfg.Entries.Append(ctx, &after, c.Actor, c.ID, list)
	})
	if err != nil {
		return before, after, fmt.Errorf("skill %s: %w", ref, err)
	}
	return before, after, nil
}

// position returns the position of an entry's last commit, or "" if there is none.
func (h *Handler) position(e eventlog.CatalogueEntry) string {
	if e.Head.Seq == 0 {
		return ""
	}
	return h.cfg.Entries.Position(e).String()
}

// typeLabel returns the label of a type in metrics. All unknown types have one label.
func typeLabel(t command.Type) string {
	switch t {
	case command.TypePushSkill, command.TypeTagSkill, command.TypeRemoveSkill:
		return string(t)
	}
	return "unknown"
}
