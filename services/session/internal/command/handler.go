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

// BudgetReader reads the budgets and limits of a tenant, and the tenant's usage.
type BudgetReader interface {
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
}

// Config configures a Handler. Every field except Room is required.
type Config struct {
	Sessions  eventlog.Sessions
	Room      *storage.Watch
	Budgets   BudgetReader
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

// Handler carries out the commands that gateways send to the session service.
type Handler struct {
	cfg      Config
	keyLocks [events.MaxPartitions]sync.Mutex // by tenant; locked while keys are counted and one is stored
	walks    walkCache                        // reading states of forked sessions
	manifest sync.Mutex                       // locked while the manifest of a snapshot is in memory: it may need hundreds of megabytes
}

// New returns a Handler.
func New(cfg Config) *Handler { return &Handler{cfg: cfg} }

// Handle carries out a command from the stream COMMANDS and sends the answer. It is a message handler of package bus.
func (h *Handler) Handle(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
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
	answer, err := h.execute(ctx, c)
	outcome := "ok"
	defer func() {
		took := time.Since(began)
		h.cfg.Done(metricLabel(c.Type), outcome, took)
		h.cfg.Logger.Debug("command", "command", c.ID, "type", metricLabel(c.Type), "tenant", c.Tenant, "session", c.SessionID, "execution", c.ExecutionID, "outcome", outcome, "took", took)
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

// checkIDs refuses a command whose ids have an invalid form, because ids become parts of NATS subjects.
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

// execute carries out a command of any type. The error is a *command.Error if the command is refused.
func (h *Handler) execute(ctx context.Context, c command.Command) (command.Answer, error) {
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
		return h.applyDefinition(ctx, c)
	case command.TypeRemoveAgent, command.TypeRemoveInstance, command.TypeRemoveEnvironment:
		return h.removeEntry(ctx, c)
	}
	if c.Type == command.TypeForkSession {
		var b command.ForkSession
		if err := decodeBody(c, &b); err != nil {
			return command.Answer{}, err
		}
		if b.Preview {
			return h.previewFork(ctx, c, b)
		}
	}
	build, err := h.newSessionCommandBuilder(ctx, c)
	if err != nil {
		return command.Answer{}, err
	}
	return h.executeOnSession(ctx, c, build)
}

// sessionCommandBuilder returns the command on a session's life for a client's request and the loaded state of the
// session. It returns a refusal if the request is invalid.
type sessionCommandBuilder func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error)

// newSessionCommandBuilder decodes and checks a client's command on a session, and returns its sessionCommandBuilder.
func (h *Handler) newSessionCommandBuilder(ctx context.Context, c command.Command) (sessionCommandBuilder, error) {
	switch c.Type {
	case command.TypeCreateSession:
		var b command.CreateSession
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		created, err := h.resolveSession(ctx, c, b)
		if err == nil {
			err = errors.Join(checkHostFiles(created, b.Files), checkFiles(c, b.Files))
		}
		if err == nil {
			err = h.setDefaultInstance(ctx, c, &created)
		}
		return func(_ *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.CreateSession{CommandBase: base, SessionCreated: created, Files: sessionFiles(c, b.Files)}, nil
		}, err
	case command.TypeStartExecution:
		var b command.StartExecution
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		created, err := h.resolveSession(ctx, c, b.Create)
		if err == nil {
			err = errors.Join(checkHostFiles(created, b.Post.Files), checkMessage(c, b.Post))
		}
		if err == nil {
			err = h.setDefaultInstance(ctx, c, &created)
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.StartSession{CommandBase: base, Create: created, Post: postCommand(c, b.Post, base, l)}, nil
		}, err
	case command.TypeForkSession:
		return h.forkCommandBuilder(ctx, c)
	case command.TypePostMessage:
		var b command.PostMessage
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return postCommand(c, b, base, l), nil
		}, checkMessage(c, b)
	case command.TypeRecoverExecution:
		return h.recoverCommandBuilder(ctx, c)
	case command.TypeDecideApproval:
		return approvalCommandBuilder(c)
	case command.TypeUpdateSession:
		var b command.UpdateSession
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return h.updateCommand(b, l, base)
		}, checkUpdate(b)
	case command.TypeDeleteSession:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.DeleteSession{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded}, nil
		}, nil
	case command.TypePutFile, command.TypeRemoveFile:
		return fileCommandBuilder(c)
	}
	return controlCommandBuilder(c)
}

// controlCommandBuilder returns the builder for a command without a body, such as a pause or the deletion of a session.
func controlCommandBuilder(c command.Command) (sessionCommandBuilder, error) {
	switch c.Type {
	case command.TypeInterrupt:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RequestInterrupt{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded}, nil
		}, nil
	case command.TypeCancel:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RequestCancel{CommandBase: base, ExecutionID: c.ExecutionID, ActiveEnded: l.RunView().ActiveEnded}, nil
		}, nil
	case command.TypePause:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RequestPause{CommandBase: base, ExecutionID: c.ExecutionID, ActiveEnded: l.RunView().ActiveEnded}, nil
		}, nil
	case command.TypeResume:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RequestResume{CommandBase: base, ExecutionID: c.ExecutionID, ActiveEnded: l.RunView().ActiveEnded}, nil
		}, nil
	case command.TypeTerminate:
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			v := l.RunView()
			return session.RequestTerminate{CommandBase: base, ExecutionID: c.ExecutionID, ActiveEnded: v.ActiveEnded, HasSandbox: v.HasSandbox}, nil
		}, nil
	case command.TypeSyncWorkspace:
		return func(_ *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RequestSync{CommandBase: base}, nil
		}, nil
	}
	return nil, invalidFieldError("type", fmt.Sprintf("there is no command %.64q", c.Type))
}

// executeOnSession decides on a command on a session with the loaded state of the session, appends the decision to the
// log, and returns the answer.
func (h *Handler) executeOnSession(ctx context.Context, c command.Command, build sessionCommandBuilder) (command.Answer, error) {
	answer := command.Answer{SessionID: c.SessionID, ExecutionID: c.ExecutionID}
	freshness := eventlog.AnyReplica
	err := eventlog.RetryOnConflict(func() error {
		confirmed, err := h.decideOnSession(ctx, c, build, freshness, &answer)
		if !confirmed && freshness == eventlog.AnyReplica {
			_, err = h.decideOnSession(ctx, c, build, eventlog.LeaderOnly, &answer)
		}
		freshness = eventlog.LeaderOnly
		return err
	})
	if err != nil {
		return answer, fmt.Errorf("session %s: %w", c.SessionID, err)
	}
	return answer, nil
}

// decideOnSession loads a session, decides on a command, appends the decision and completes the answer. confirmed is
// false if a replica of the stream answered and nothing was appended: for a refusal, and for a decision that changes
// nothing. An append has a guard, which detects a replica that lags; without an append the caller must repeat the call
// with the state of the stream's leader.
func (h *Handler) decideOnSession(ctx context.Context, c command.Command, build sessionCommandBuilder, freshness eventlog.Freshness, answer *command.Answer) (confirmed bool, err error) {
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
	list, err := decideEvents(build, l, session.CommandBase{CommandMeta: events.CommandMeta{CommandID: c.ID, Now: h.cfg.Now()}})
	if (err != nil || len(list) == 0) && freshness == eventlog.AnyReplica {
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
		if err := errors.Join(h.checkStoreSpace(ctx, c.Type), h.checkEventLimit(ctx, c)); err != nil {
			return true, err
		}
		if err := h.cfg.Sessions.AppendLife(ctx, l, c.Actor, c.ID, list); err != nil {
			return true, err
		}
	}
	h.notifyExecutor(l, list)
	answer.Position, answer.Forked = h.cfg.Sessions.Position(l.ID, l.LifeHead.Seq).String(), forkPoint(c, l)
	return true, nil
}

// checkStoreSpace refuses a command that stores data if the NATS store has only its reserve left.
func (h *Handler) checkStoreSpace(ctx context.Context, t command.Type) error {
	if !t.IsRefusedWhenFull() {
		return nil
	}
	if err := h.cfg.Room.Check(ctx, 0); err != nil {
		return &command.Error{Code: command.CodeStorageFull, Detail: err.Error()}
	}
	return nil
}

// checkEventLimit refuses a command that adds events to a session if the tenant has reached its limit of events for the
// day.
func (h *Handler) checkEventLimit(ctx context.Context, c command.Command) error {
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

// decideEvents returns the events with which a command, for which build is the builder, changes the loaded session.
func decideEvents(build sessionCommandBuilder, l *eventlog.SessionState, base session.CommandBase) ([]events.Event, error) {
	cmd, err := build(l, base)
	if err != nil {
		return nil, err
	}
	return session.Decide(l.Life, cmd)
}

// notifyExecutor notifies the executor that holds the session if list has an event that the executor must act on at
// once, such as a control or a change of the workspace. A lost notification does no harm, because the executor also
// reads the log.
func (h *Handler) notifyExecutor(l *eventlog.SessionState, list []events.Event) {
	if l.Run.IsIdle() || l.Run.Holder == "" {
		return
	}
	for _, e := range list {
		switch e.Data.(type) {
		case events.InterruptRequested, events.CancelRequested, events.PauseRequested, events.ResumeRequested, events.TerminateRequested,
			events.ApprovalDecided, events.SyncRequested, events.FilePut, events.FileRemoved:
			body, err := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}.Encode()
			if err == nil {
				err = h.cfg.NATS.Publish(topology.ExecutorCtlSubject(l.Run.Holder), body)
			}
			if err != nil {
				h.cfg.Logger.Warn("the executor was not notified; it finds the event when it reads the log next", "session", l.ID, "error", err)
			}
			return
		}
	}
}

// metricLabel returns the label of a command's type in metrics. All unknown types share one label.
func metricLabel(t command.Type) string {
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
