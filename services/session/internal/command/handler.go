// Package command carries out the commands of gateways: it loads the session, decides,
// appends, and answers. Each command has an id, so a redelivery changes
// nothing and has the same answer as the first delivery.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/hostpath"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
)

// Budgets returns the budgets and limits of a tenant, and its usage.
type Budgets interface {
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
}

// Config configures a Handler. Every field except Room is required.
type Config struct {
	Sessions  eventlog.Sessions
	Room      *storage.Watch
	Budgets   Budgets
	NATS      *nats.Conn
	Dead      DeadLetters
	Now       func() time.Time
	Providers []string
	Images    imagepolicy.Policy // images that tenants may name if sandboxes are containers
	HostPaths hostpath.Policy    // folders in which sessions with local sandboxes may work
	Logger    *slog.Logger
	Service   string // the service and its copy, which the log names as the writer

	IdleTimeout, TurnLimit, SessionLimit time.Duration

	SyncInterval, HealthInterval, SandboxMaxAge time.Duration

	// LiveKeys returns the chains of a tenant's API keys that hold one commit: keys that are not revoked.
	LiveKeys func(ctx context.Context, tenant string) ([]events.Subject, error)
	MaxKeys  func(tenant string) int // maximum number of API keys of a tenant, without revoked ones

	// Snapshots are the workspaces in the object store, for forks.
	Snapshots func(ctx context.Context) (workspace.Store, error)

	// Done is called after each command with its type, its outcome (ok, a refusal's code, or retried) and the time that it took.
	Done func(typ, outcome string, took time.Duration)
}

// Handler carries out commands.
type Handler struct {
	cfg      Config
	keyLocks [events.MaxPartitions]sync.Mutex // by tenant; locked while keys are counted and one is stored
	walks    walkCache                        // reading states of forked sessions
	manifest sync.Mutex                       // locked while the manifest of a snapshot is in memory: it may need hundreds of megabytes
}

// New returns a Handler.
func New(cfg Config) *Handler { return &Handler{cfg: cfg} }

// Handle is the bus handler for COMMANDS.
func (h *Handler) Handle(ctx context.Context, msg *message.Message) error {
	if err := bus.Routed(ctx); err != nil {
		return err
	}
	var c command.Command
	if err := json.Unmarshal(msg.Payload, &c); err != nil {
		return bus.Poison(fmt.Errorf("decode command: %w", err))
	}
	if err := checkIDs(c); err != nil {
		return bus.Poison(err)
	}
	c.Actor = c.Actor.WrittenBy(h.cfg.Service)
	began := time.Now()
	answer, err := h.do(ctx, c)
	outcome := "ok"
	defer func() {
		took := time.Since(began)
		h.cfg.Done(typeLabel(c.Type), outcome, took)
		h.cfg.Logger.Debug("command", "command", c.ID, "type", typeLabel(c.Type), "tenant", c.Tenant, "session", c.SessionID, "execution", c.ExecutionID, "outcome", outcome, "took", took)
	}()
	var refused *command.Error
	switch {
	case errors.As(err, &refused):
		answer = command.Answer{SessionID: c.SessionID, ExecutionID: c.ExecutionID, Error: refused}
	case errors.Is(err, eventlog.ErrTooLarge):
		answer.Error = &command.Error{Code: "PAYLOAD_TOO_LARGE", Detail: "the request does not fit into one commit of the log; send less at once"}
	case errors.Is(err, eventlog.ErrFull):
		answer.Error = &command.Error{Code: "UNAVAILABLE", Detail: "the log is at its limit and refuses writes; nothing was stored"}
	case err != nil:
		outcome = "retried"
		return bus.Transient(err)
	}
	if answer.Error != nil {
		outcome = answer.Error.Code
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return bus.Poison(fmt.Errorf("encode answer: %w", err))
	}
	return bus.Reply(h.cfg.NATS, msg, bus.Answer{Payload: body})
}

// checkIDs refuses values that are not ids, because ids become parts of subjects.
func checkIDs(c command.Command) error {
	if err := events.CheckTenant("tenant", c.Tenant); err != nil {
		return err
	}
	if err := events.CheckID("id", events.KindCommand, c.ID); err != nil {
		return err
	}
	switch c.Type {
	case command.TypeCreateKey, command.TypeRevokeKey, command.TypeSetBudget, command.TypeRemoveBudget, command.TypeSetLimits, command.TypeRemoveLimits, command.TypeRetryDeadLetter, command.TypeDropDeadLetter,
		command.TypeApplyAgent, command.TypeApplyInstance, command.TypeApplyEnvironment,
		command.TypeRemoveAgent, command.TypeRemoveInstance, command.TypeRemoveEnvironment:
		return nil
	case command.TypeTerminate:
		if c.ExecutionID == "" { // the environment
			break
		}
		fallthrough
	case command.TypePostMessage, command.TypeStartExecution, command.TypeRecoverExecution, command.TypeCancel, command.TypePause, command.TypeResume, command.TypeDecideApproval:
		if err := events.CheckID("executionId", events.KindExecution, c.ExecutionID); err != nil {
			return err
		}
	}
	return events.CheckID("sessionId", events.KindSession, c.SessionID)
}

// do carries out a command of any type. The error is a *command.Error if the command is refused.
func (h *Handler) do(ctx context.Context, c command.Command) (command.Answer, error) {
	switch c.Type {
	case command.TypeCreateKey:
		return h.createKey(ctx, c)
	case command.TypeRevokeKey:
		return h.revokeKey(ctx, c)
	case command.TypeSetBudget, command.TypeRemoveBudget:
		return h.handleBudget(ctx, c)
	case command.TypeSetLimits, command.TypeRemoveLimits:
		return h.handleLimits(ctx, c)
	case command.TypeRetryDeadLetter, command.TypeDropDeadLetter:
		return h.handleDeadLetter(ctx, c)
	case command.TypeApplyAgent, command.TypeApplyInstance, command.TypeApplyEnvironment:
		return h.apply(ctx, c)
	case command.TypeRemoveAgent, command.TypeRemoveInstance, command.TypeRemoveEnvironment:
		return h.remove(ctx, c)
	}
	build, err := h.builder(ctx, c)
	if err != nil {
		return command.Answer{}, err
	}
	return h.session(ctx, c, build)
}

// builder converts a request into a command on the session's life, for the loaded state of the session. It returns an
// error if the request itself is invalid.
type builder func(l *eventlog.Loaded, base session.Base) (session.Command, error)

// builder decodes and checks a command on a session, and returns its builder.
func (h *Handler) builder(ctx context.Context, c command.Command) (builder, error) {
	switch c.Type {
	case command.TypeCreateSession:
		var b command.CreateSession
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		created, err := h.resolveSession(ctx, c, b)
		if err == nil {
			err = errors.Join(checkHostFiles(created, b.Files), checkFiles(c, b.Files))
		}
		if err == nil {
			err = h.setDefaultInstance(ctx, c, &created)
		}
		return func(_ *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.Create{Base: base, SessionCreated: created, Files: sessionFiles(c, b.Files)}, nil
		}, err
	case command.TypeStartExecution:
		var b command.StartExecution
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		created, err := h.resolveSession(ctx, c, b.Create)
		if err == nil {
			err = errors.Join(checkHostFiles(created, b.Post.Files), checkPost(c, b.Post))
		}
		if err == nil {
			err = h.setDefaultInstance(ctx, c, &created)
		}
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.Start{Base: base, Create: created, Post: post(c, b.Post, base, l)}, nil
		}, err
	case command.TypeForkSession:
		return h.forkBuilder(ctx, c)
	case command.TypePostMessage:
		var b command.PostMessage
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return post(c, b, base, l), nil
		}, checkPost(c, b)
	case command.TypeRecoverExecution:
		return h.recoverBuilder(ctx, c)
	case command.TypeDecideApproval:
		return approvalBuilder(c)
	case command.TypeUpdateSession:
		var b command.UpdateSession
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return h.update(b, l, base)
		}, checkUpdate(b)
	case command.TypeDeleteSession:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.Delete{Base: base, ActiveEnded: l.View().ActiveEnded}, nil
		}, nil
	case command.TypePutFile, command.TypeRemoveFile:
		return fileBuilder(c)
	}
	return controlBuilder(c)
}

// controlBuilder returns the builder of a command without a body.
func controlBuilder(c command.Command) (builder, error) {
	switch c.Type {
	case command.TypeInterrupt:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.RequestInterrupt{Base: base, ActiveEnded: l.View().ActiveEnded}, nil
		}, nil
	case command.TypeCancel:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.RequestCancel{Base: base, ExecutionID: c.ExecutionID, ActiveEnded: l.View().ActiveEnded}, nil
		}, nil
	case command.TypePause:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.RequestPause{Base: base, ExecutionID: c.ExecutionID, ActiveEnded: l.View().ActiveEnded}, nil
		}, nil
	case command.TypeResume:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.RequestResume{Base: base, ExecutionID: c.ExecutionID, ActiveEnded: l.View().ActiveEnded}, nil
		}, nil
	case command.TypeTerminate:
		return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
			v := l.View()
			return session.RequestTerminate{Base: base, ExecutionID: c.ExecutionID, ActiveEnded: v.ActiveEnded, HasSandbox: v.HasSandbox}, nil
		}, nil
	case command.TypeSyncWorkspace:
		return func(_ *eventlog.Loaded, base session.Base) (session.Command, error) {
			return session.RequestSync{Base: base}, nil
		}, nil
	}
	return nil, invalid("type", fmt.Sprintf("there is no command %.64q", c.Type))
}

// session carries out a command on a session.
func (h *Handler) session(ctx context.Context, c command.Command, build builder) (command.Answer, error) {
	answer := command.Answer{SessionID: c.SessionID, ExecutionID: c.ExecutionID}
	freshness := eventlog.Any
	err := eventlog.Decide(func() error {
		confirmed, err := h.decide(ctx, c, build, freshness, &answer)
		if !confirmed && freshness == eventlog.Any {
			_, err = h.decide(ctx, c, build, eventlog.Leader, &answer)
		}
		freshness = eventlog.Leader
		return err
	})
	if err != nil {
		return answer, fmt.Errorf("session %s: %w", c.SessionID, err)
	}
	return answer, nil
}

// decide loads the session, decides on the command, appends the decision and completes the answer. confirmed is false
// for a refusal, and for a decision that changes nothing, if they were made from a replica: an append has a guard,
// which detects a replica that lags, but these decisions have none. They count only if the state came from the
// stream's leader.
func (h *Handler) decide(ctx context.Context, c command.Command, build builder, freshness eventlog.Freshness, answer *command.Answer) (confirmed bool, err error) {
	l, err := h.cfg.Sessions.Load(ctx, c.Tenant, c.SessionID, freshness)
	if err != nil {
		return true, err
	}
	if l.Life.Agent != "" && !events.AllowsAgent(c.Agents, l.Life.Agent) {
		return true, &command.Error{Code: session.CodeNotFound, Field: "sessionId", Detail: "there is no such session"}
	}
	at, done, err := h.cfg.Sessions.CommandSeq(ctx, l, c.ID)
	if err != nil {
		return true, err
	}
	if done {
		answer.Position, answer.Forked = h.cfg.Sessions.Position(l.ID, at).String(), forkPoint(c, l)
		return true, nil
	}
	list, err := decideWith(build, l, session.Base{Meta: events.Meta{CommandID: c.ID, Now: h.cfg.Now()}})
	if (err != nil || len(list) == 0) && freshness == eventlog.Any {
		return false, err
	}
	var refused *session.Error
	if errors.As(err, &refused) {
		return true, &command.Error{Code: refused.Code, Field: refused.Field, Detail: refused.Detail}
	}
	if err != nil {
		return true, err
	}
	if len(list) > 0 {
		if err := errors.Join(h.checkRoom(ctx, c.Type), h.checkEvents(ctx, c)); err != nil {
			return true, err
		}
		if err := h.cfg.Sessions.AppendLife(ctx, l, c.Actor, c.ID, list); err != nil {
			return true, err
		}
	}
	h.hint(l, list)
	answer.Position, answer.Forked = h.cfg.Sessions.Position(l.ID, l.LifeHead.Seq).String(), forkPoint(c, l)
	return true, nil
}

// checkRoom refuses a command that needs room while only the reserve of the store is left.
func (h *Handler) checkRoom(ctx context.Context, t command.Type) error {
	if !t.IsRefusedWhenFull() {
		return nil
	}
	if err := h.cfg.Room.Check(ctx, 0); err != nil {
		return &command.Error{Code: command.CodeStorageFull, Detail: err.Error()}
	}
	return nil
}

// checkEvents refuses a command that adds events to a session if the tenant has reached its limit of events for the
// day.
func (h *Handler) checkEvents(ctx context.Context, c command.Command) error {
	if !c.Type.IsRefusedWhenFull() {
		return nil
	}
	t, err := h.cfg.Budgets.Get(ctx, c.Tenant)
	if err != nil {
		return err
	}
	if why := t.ExceededEventLimit(c.Tenant, h.cfg.Now()); why != "" {
		return &command.Error{Code: events.CodeTenantEvents, Detail: why}
	}
	return nil
}

// decideWith returns the events of a command for the loaded state of a session.
func decideWith(build builder, l *eventlog.Loaded, base session.Base) ([]events.Event, error) {
	cmd, err := build(l, base)
	if err != nil {
		return nil, err
	}
	return session.Decide(l.Life, cmd)
}

// hint notifies the executor that holds the session of a stored control or workspace change. A lost hint does no
// harm, because the executor also reads the log.
func (h *Handler) hint(l *eventlog.Loaded, list []events.Event) {
	if l.Run.IsIdle() || l.Run.Holder == "" {
		return
	}
	for _, e := range list {
		switch e.Data.(type) {
		case events.InterruptRequested, events.CancelRequested, events.PauseRequested, events.ResumeRequested, events.TerminateRequested,
			events.ApprovalDecided, events.SyncRequested, events.FilePut, events.FileRemoved:
			body, err := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}.Encode()
			if err == nil {
				err = h.cfg.NATS.Publish(topology.Ctl(l.Run.Holder), body)
			}
			if err != nil {
				h.cfg.Logger.Warn("a hint was not sent; the executor's next look finds the control", "session", l.ID, "error", err)
			}
			return
		}
	}
}

// typeLabel returns the label of a type in metrics. All unknown types have one label.
func typeLabel(t command.Type) string {
	switch t {
	case command.TypeCreateSession, command.TypeForkSession, command.TypeUpdateSession, command.TypePostMessage, command.TypeStartExecution, command.TypeRecoverExecution, command.TypeInterrupt, command.TypeCancel,
		command.TypePause, command.TypeResume, command.TypeTerminate, command.TypeSyncWorkspace, command.TypePutFile, command.TypeRemoveFile,
		command.TypeRetryDeadLetter, command.TypeDropDeadLetter, command.TypeDeleteSession, command.TypeCreateKey, command.TypeRevokeKey, command.TypeSetBudget, command.TypeRemoveBudget, command.TypeSetLimits, command.TypeRemoveLimits,
		command.TypeApplyAgent, command.TypeApplyInstance, command.TypeApplyEnvironment,
		command.TypeRemoveAgent, command.TypeRemoveInstance, command.TypeRemoveEnvironment:
		return string(t)
	}
	return "unknown"
}
