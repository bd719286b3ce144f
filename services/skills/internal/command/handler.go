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
	codeInvalidRequest = "INVALID_REQUEST"
	codeSkillNotFound  = "SKILL_NOT_FOUND"
	codeUploadMissing  = "SKILL_UPLOAD_MISSING"
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

// Handler carries out the commands about skills that gateways send.
type Handler struct {
	cfg    Config
	keeper zipStore
}

// New returns a Handler. SetStore must be called before the first command.
func New(cfg Config) *Handler { return &Handler{cfg: cfg} }

// SetStore sets the store in which the Handler keeps the ZIPs of skills. It must be called before Handle.
func (h *Handler) SetStore(store Store) { h.keeper.store = store }

// Handle carries out a command from the stream COMMANDS and sends the answer. It is a message handler of package bus.
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
	answer, err := h.execute(ctx, c)
	outcome := "ok"
	defer func() {
		took := time.Since(began)
		h.cfg.Done(metricLabel(c.Type), outcome, took)
		attrs := []any{"command", c.ID, "type", metricLabel(c.Type), "tenant", c.Tenant, "outcome", outcome, "took", took}
		if answer.Ref != nil {
			attrs = append(attrs, "skill", answer.Ref.String())
		}
		h.cfg.Logger.Debug("command", attrs...)
	}()
	if refused := refusalOf(err); refused != nil {
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

// refusalOf returns the refusal that the client receives for an error that another attempt cannot change, and nil for
// other errors.
func refusalOf(err error) *command.Error {
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
		return &command.Error{Code: codeSkillNotFound, Field: decided.Field, Detail: decided.Detail}
	case errors.As(err, &decided):
		return &command.Error{Code: decided.Code, Field: decided.Field, Detail: decided.Detail}
	case errors.As(err, &none):
		return skillNotFoundError(none.Ref)
	case errors.Is(err, eventlog.ErrTooLarge):
		return &command.Error{Code: "PAYLOAD_TOO_LARGE", Detail: "the request does not fit into one commit of the log; send less at once"}
	case errors.Is(err, eventlog.ErrFull):
		return &command.Error{Code: "UNAVAILABLE", Detail: "the log is at its limit and refuses writes; nothing was stored"}
	}
	return nil
}

// invalidFieldError returns the refusal of a command with an invalid field. detail is the message for the client.
func invalidFieldError(field, detail string) *command.Error {
	return &command.Error{Code: codeInvalidRequest, Field: field, Detail: detail}
}

// skillNotFoundError returns the refusal of a command whose reference names a skill or a version that does not exist.
func skillNotFoundError(ref events.Reference) *command.Error {
	if ref.Version == "" {
		return &command.Error{Code: codeSkillNotFound, Field: "slug", Detail: fmt.Sprintf("there is no skill %s", ref)}
	}
	return &command.Error{Code: codeSkillNotFound, Field: "version", Detail: fmt.Sprintf("there is no skill %s, or no such version of it", ref)}
}

// execute carries out a command of any type.
func (h *Handler) execute(ctx context.Context, c command.Command) (command.Answer, error) {
	switch c.Type {
	case command.TypePushSkill:
		return h.pushSkill(ctx, c)
	case command.TypeTagSkill:
		return h.tagSkill(ctx, c)
	case command.TypeRemoveSkill:
		return h.removeSkill(ctx, c)
	}
	return command.Answer{}, invalidFieldError("type", fmt.Sprintf("there is no command %.64q of skills", c.Type))
}

// decodeBody decodes the body of a command, which is JSON. The error is a refusal.
func decodeBody(c command.Command, into any) error {
	err := json.Unmarshal(c.Body, into)
	var ref *events.ReferenceError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ref):
		return referenceRefusal(ref)
	}
	return invalidFieldError("body", fmt.Sprintf("the body of %s does not decode: %v", c.Type, err))
}

// checkReference refuses a command with an invalid reference to a skill.
func checkReference(ref events.Reference) error {
	var bad *events.ReferenceError
	switch err := ref.Check(); {
	case err == nil:
		return nil
	case errors.As(err, &bad):
		return referenceRefusal(bad)
	default:
		return invalidFieldError("ref", err.Error())
	}
}

// referenceRefusal converts the error about an invalid reference to a refusal.
func referenceRefusal(bad *events.ReferenceError) error {
	if bad.Field == "" {
		return invalidFieldError("ref", bad.Detail)
	}
	return invalidFieldError(bad.Field, bad.Detail)
}

// entryDecider returns the events that a command appends, given the state of a catalogue entry before the command.
type entryDecider func(e eventlog.CatalogueEntry, meta events.CommandMeta) ([]events.Event, error)

// changeEntry appends the events that decide returns for the catalogue entry ref. It returns the entry before and after
// the command.
func (h *Handler) changeEntry(ctx context.Context, c command.Command, ref events.Reference, decide entryDecider) (before, after eventlog.CatalogueEntry, err error) {
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

// entryPosition returns the position of a catalogue entry's last commit, or "" if there is none.
func (h *Handler) entryPosition(e eventlog.CatalogueEntry) string {
	if e.Head.Seq == 0 {
		return ""
	}
	return h.cfg.Entries.Position(e).String()
}

// metricLabel returns the label of a command's type in metrics. All unknown types share one label.
func metricLabel(t command.Type) string {
	switch t {
	case command.TypePushSkill, command.TypeTagSkill, command.TypeRemoveSkill:
		return string(t)
	}
	return "unknown"
}
