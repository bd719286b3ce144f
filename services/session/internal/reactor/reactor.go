// Package reactor acts on commits. After each commit that can make something
// due, it loads the state of the session, publishes the job that is due,
// dispatches the next message, ends executions that no executor will claim, and
// arms the session's timer. Handlers of commands only append: the log is the outbox.
package reactor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
)

// Leases reports which engines and executors have a lease.
type Leases interface {
	// EngineGoneFor returns the time for which no executor of an engine has renewed a lease.
	EngineGoneFor(provider, engine string) time.Duration
	// Lives reports whether an executor has a lease.
	HasLease(ctx context.Context, executor string) (bool, error)
}

// BudgetReader reads the budgets and limits of tenants, and their usage.
type BudgetReader interface {
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
}

// Config configures a Reactor. Every field is required.
type Config struct {
	Sessions  eventlog.Sessions
	JetStream jetstream.JetStream
	Publisher message.Publisher // deduplicates by message id
	Leases    Leases
	Budgets   BudgetReader
	// EngineGone is the maximum time that an engine may be without a lease before its sessions' jobs are offered to others.
	EngineGone time.Duration
	Now        func() time.Time
	Logger     *slog.Logger
	Reacted    func(lag time.Duration)                                   // is called after each commit, with the time since the log stored it
	Published  func()                                                    // is called after each job
	Forget     func(ctx context.Context, tenant, execution string) error // removes the secrets of an execution that has ended
	Ended      func(tenant, session string)                              // is called when an execution of a session has ended
	Service    string                                                    // the service and its copy, which the log names as the writer
}

// Reactor does the work that becomes due for a session after commits and at deadlines: it appends events, publishes
// jobs and sets the session's timer.
type Reactor struct {
	cfg Config

	mu     sync.Mutex
	timers jetstream.Stream // nil until the first use
}

// New returns a Reactor.
func New(cfg Config) *Reactor { return &Reactor{cfg: cfg} }

// actor returns the actor that the log names for the commits of the Reactor.
func (r *Reactor) actor() events.Actor {
	return events.Actor{Kind: "service", ID: r.cfg.Service}.WrittenBy(r.cfg.Service)
}

// maxStateLoads is the maximum number of times that a session's state is loaded for one message, because another writer
// changes the session meanwhile. After that the message is redelivered.
const maxStateLoads = 32

// errStateKeepsChanging is returned if other writers changed a session during each of maxStateLoads attempts.
var errStateKeepsChanging = errors.New("the session's state keeps changing")

// HandleCommit handles a message of the log: it does what is due for the session of the commit.
func (r *Reactor) HandleCommit(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	name := bus.Subject(msg)
	if aspect := events.Aspect(name[strings.LastIndexByte(name, '.')+1:]); aspect != events.Life && aspect != events.Run {
		return nil // the catalogue
	}
	subject, err := r.cfg.Sessions.Log.Partitioning().ParseSubject(name)
	if err != nil {
		return bus.Poison(err)
	}
	c, err := summarizeCommit(msg.Payload)
	if err != nil {
		return bus.Poison(err)
	}
	if !c.matters {
		return nil
	}
	l, err := r.completeDueWork(ctx, subject.Tenant, subject.ID)
	if err != nil {
		return err
	}
	if l.Life.Secrets {
		if err := r.deleteSecrets(ctx, subject, bus.Sequence(msg), c.ended); err != nil {
			return err
		}
	}
	if len(c.ended) > 0 {
		r.cfg.Ended(subject.Tenant, subject.ID)
	}
	r.cfg.Reacted(r.cfg.Now().Sub(bus.StoredTime(msg)))
	return nil
}

// deleteSecrets deletes the secrets of executions that have ended according to the commit at a stream sequence. It
// first checks that the commit is part of the log; for everything else a Reactor uses a commit only as a reason to load
// the session's state.
func (r *Reactor) deleteSecrets(ctx context.Context, s events.Subject, seq uint64, ended []string) error {
	if len(ended) == 0 {
		return nil
	}
	_, err := r.cfg.Sessions.Log.CommitAt(ctx, r.cfg.Sessions.Position(s.ID, seq))
	var foreign *eventlog.ForeignError
	if errors.As(err, &foreign) {
		return bus.Poison(foreign)
	}
	if err != nil && !errors.Is(err, eventlog.ErrNotFound) { // executions whose commits the janitor has erased since have ended too
		return bus.Transient(err)
	}
	for _, execution := range ended {
		if err := r.cfg.Forget(ctx, s.Tenant, execution); err != nil {
			return bus.Transient(err)
		}
	}
	return nil
}

// commitSummary holds the part of a session's commit that decides whether the Reactor must do something for the
// session.
type commitSummary struct {
	matters bool     // the commit can make something due
	ended   []string // executions that it ends
}

// summarizeCommit returns the summary of a commit, without decoding the data of its events.
func summarizeCommit(payload []byte) (commitSummary, error) {
	var c struct {
		Events []struct {
			Type        events.Type `json:"type"`
			ExecutionID string      `json:"executionId"`
		} `json:"events"`
	}
	var g commitSummary
	if err := json.Unmarshal(payload, &c); err != nil {
		return g, fmt.Errorf("decode commit: %w", err)
	}
	for _, e := range c.Events {
		entry, known := events.LookupType(e.Type)
		if events.IsTerminal(e.Type) {
			g.ended = append(g.ended, e.ExecutionID)
		}
		switch e.Type {
		case events.ExecutionClaimed{}.EventType(), events.SandboxReady{}.EventType(), events.SandboxCreating{}.EventType(),
			events.ExecutionPaused{}.EventType(), events.ExecutionResumed{}.EventType(),
			events.ApprovalResolved{}.EventType(), events.ApprovalRetracted{}.EventType(): // the turn limit runs again
			g.matters = true
		}
		g.matters = g.matters || known && (entry.Aspect == events.Life || events.IsTerminal(e.Type))
	}
	return g, nil
}

// HandleTimer handles the timer of a session that fired. It does everything that is due for the session now, and not
// only what the timer was set for.
func (r *Reactor) HandleTimer(ctx context.Context, msg *message.Message) error {
	if err := bus.RequireRouted(ctx); err != nil {
		return err
	}
	ref, err := topology.DecodeSessionRef(msg.Payload)
	if err != nil {
		return bus.Poison(err)
	}
	_, err = r.completeDueWork(ctx, ref.Tenant, ref.Session)
	return err
}

// completeDueWork loads a session and does one thing that is due, and repeats this until nothing is due. A conflict
// means that another writer did it first. It returns the state of the session that it loaded last.
func (r *Reactor) completeDueWork(ctx context.Context, tenant, id string) (*eventlog.SessionState, error) {
	for range maxStateLoads {
		l, err := r.cfg.Sessions.Load(ctx, tenant, id, eventlog.LeaderOnly)
		if err != nil {
			return l, bus.Transient(err)
		}
		wrote, err := r.appendDueEvent(ctx, l)
		var conflict *eventlog.ConflictError
		switch {
		case errors.As(err, &conflict), err == nil && wrote:
			continue
		case err != nil:
			return l, bus.Transient(err)
		}
		if err := r.publishDueJob(ctx, l); err != nil {
			return l, bus.Transient(err)
		}
		moved, err := r.armTimer(ctx, l)
		if err != nil {
			return l, bus.Transient(err)
		}
		if !moved {
			return l, nil
		}
	}
	return nil, errStateKeepsChanging
}

// appendDueEvent appends the one event to the session that is due, if there is any, such as the dispatch of the next
// execution or the end of a lost one. It reports whether it has appended an event.
func (r *Reactor) appendDueEvent(ctx context.Context, l *eventlog.SessionState) (wrote bool, err error) {
	now := r.cfg.Now()
	base := func(what string) session.CommandBase {
		return session.CommandBase{CommandMeta: events.CommandMeta{CommandID: events.DeriveID(events.KindCommand, what, l.ID, l.LifeHead.Hash, l.RunHead.Hash), Now: now}}
	}
	for _, c := range []session.Command{
		session.HandleDeadline{CommandBase: base("expire"), Run: l.RunView()},
		session.DispatchNext{CommandBase: base("advance"), ActiveEnded: l.RunView().ActiveEnded},
	} {
		list, err := session.Decide(l.Life, c)
		var refused *session.Error
		if errors.As(err, &refused) {
			continue // the session is deleted or does not exist: nothing is due on its life
		}
		if err != nil {
			return false, err
		}
		if len(list) > 0 {
			return true, r.cfg.Sessions.AppendLife(ctx, l, r.actor(), list[0].ID, list)
		}
	}
	outcome, err := r.endWithoutExecutor(ctx, l, now)
	if err != nil || outcome == nil {
		return false, err
	}
	return true, r.endActiveExecution(ctx, l, outcome, now)
}

// endWithoutExecutor returns the terminal event of the active execution if no executor will end it, and nil otherwise.
// It returns an event if the execution was cancelled before an executor claimed it, if a budget or a limit that it
// needs is used up, or if its turn limit has passed and its executor is gone.
func (r *Reactor) endWithoutExecutor(ctx context.Context, l *eventlog.SessionState, now time.Time) (events.Payload, error) {
	active := l.Life.Active.ExecutionID
	if l.DueWork() == run.EndUnstarted {
		return events.ExecutionCancelled{Reason: l.Life.ControlOf(active).Reason}, nil
	}
	if l.DueWork() == run.ExecuteTurn && l.Run.Execution != active {
		if outcome, err := r.budgetExceededEnd(ctx, l, now); err != nil || outcome != nil {
			return outcome, err
		}
	}
	if !r.isOverdue(l, now) {
		return nil, nil
	}
	if l.Run.Execution != active {
		return events.ExecutionFailed{Code: "EXECUTOR_LOST", Message: "no executor claimed the execution within its turn limit"}, nil
	}
	lives, err := r.cfg.Leases.HasLease(ctx, l.Run.Holder)
	if err != nil || lives {
		return nil, err
	}
	return events.ExecutionFailed{Code: "EXECUTOR_LOST", Message: "the turn limit passed and the executor that held the execution is gone"}, nil
}

// budgetExceededEnd returns the terminal event of the session's next execution if a budget, or the tenant's limit of
// events, prevents its start, and nil otherwise. The usage of the tenant that the Reactor knows may lag behind the log:
// the executor checks it again before it claims the execution.
func (r *Reactor) budgetExceededEnd(ctx context.Context, l *eventlog.SessionState, now time.Time) (events.Payload, error) {
	t, err := r.cfg.Budgets.Get(ctx, l.Tenant)
	if err != nil {
		return nil, err
	}
	if failed := budget.CheckStart(l, t, now); failed != nil {
		return *failed, nil
	}
	return nil, nil
}

// isOverdue reports whether the active execution has run longer than its turn limit and the grace period.
func (r *Reactor) isOverdue(l *eventlog.SessionState, now time.Time) bool {
	at, ok := l.Life.TurnDeadline(l.RunView())
	return ok && !now.Before(at)
}

// endActiveExecution appends the terminal event outcome of the active execution. If an executor held the execution, the
// event states that the agent was not stopped, because the session service cannot reach sandboxes.
func (r *Reactor) endActiveExecution(ctx context.Context, l *eventlog.SessionState, outcome events.Payload, now time.Time) error {
	if failed, ok := outcome.(events.ExecutionFailed); ok && l.Run.Execution == l.Life.Active.ExecutionID && l.Run.Sandbox.Journal != "" {
		outcome = failed.WithStopFailure(errors.New("no executor holds the execution; the next sweep of an executor of its engine stops it"))
	}
	blocks, err := r.cfg.Sessions.OpenBlocks(ctx, l.ID, l.Run.Open)
	if err != nil {
		return err
	}
	id := events.DeriveID(events.KindCommand, "abandon", l.Life.Active.ExecutionID, l.RunHead.Hash)
	d, err := run.Decide(l.Run, run.AbandonExecution{
		CommandMeta: events.CommandMeta{CommandID: id, Now: now}, ExecutionID: l.Life.Active.ExecutionID, Turn: l.Life.Active.Turn, By: r.actor().ID, Outcome: outcome, Blocks: blocks,
	})
	if errors.Is(err, run.ErrEnded) {
		return nil
	}
	if err != nil {
		return err
	}
	return r.cfg.Sessions.AppendRun(ctx, l, r.actor(), events.DeriveID(events.KindCommit, id), d)
}

// publishDueJob publishes the job that is due for a session to the stream JOBS. The message id is run.JobID, so that
// JOBS stores the job once.
func (r *Reactor) publishDueJob(ctx context.Context, l *eventlog.SessionState) error {
	id := run.JobID(&l.Life, &l.Run)
	if id == "" {
		return nil
	}
	return r.storeJob(ctx, l, id)
}

// storeJob publishes a job for a session to the stream JOBS, with a message id.
func (r *Reactor) storeJob(ctx context.Context, l *eventlog.SessionState, id string) error {
	subject := topology.ProviderJobSubject(l.Life.Provider)
	if box := l.Run.Sandbox; box.Engine != "" && r.cfg.Leases.EngineGoneFor(box.Provider, box.Engine) < r.cfg.EngineGone {
		subject = topology.EngineJobSubject(box.Provider, box.Engine)
	}
	body, err := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}.Encode()
	if err != nil {
		return err
	}
	if err := r.cfg.Publisher.Publish(subject, bus.NewMessage(ctx, id, body)); err != nil {
		return fmt.Errorf("publish job of %s: %w", l.ID, err)
	}
	r.cfg.Published()
	return nil
}

// armTimer sets the session's timer to its earliest deadline, unless the timer fires
// before that anyway. It reports whether the state of the session changed meanwhile.
func (r *Reactor) armTimer(ctx context.Context, l *eventlog.SessionState) (moved bool, err error) {
	at, ok := l.Life.NextDeadline(l.RunView())
	if !ok {
		return false, nil
	}
	now := r.cfg.Now()
	if !at.After(now) {
		// The turn is overdue, but its executor is alive. Check it again after TurnGracePeriod.
		at = now.Add(session.TurnGracePeriod)
	}
	armed, err := r.timerFireTime(ctx, l.ID)
	if err != nil {
		return false, err
	}
	if armed.After(now) && !armed.After(at) {
		return false, nil
	}
	if err := r.scheduleTimer(ctx, l, at); err != nil {
		return false, err
	}
	again, err := r.cfg.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.LeaderOnly)
	if err != nil {
		return false, err
	}
	return again.LifeHead.Seq != l.LifeHead.Seq || again.RunHead.Seq != l.RunHead.Seq, nil
}

// timerStream returns the stream TIMERS. It keeps the handle, because getting one is a round trip to the stream's
// leader.
func (r *Reactor) timerStream(ctx context.Context) (jetstream.Stream, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timers != nil {
		return r.timers, nil
	}
	stream, err := r.cfg.JetStream.Stream(ctx, topology.StreamTimers)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", topology.StreamTimers, err)
	}
	r.timers = stream
	return stream, nil
}

// headerFireTime is the message header that holds the time at which a session's timer fires, in Unix milliseconds.
const headerFireTime = "Spool-Armed-At"

// timerFireTime returns the time at which the timer of the session id fires, or the zero time if none is set.
func (r *Reactor) timerFireTime(ctx context.Context, id string) (time.Time, error) {
	stream, err := r.timerStream(ctx)
	if err != nil {
		return time.Time{}, err
	}
	msg, err := stream.GetLastMsgForSubject(ctx, topology.TimerScheduleSubject(id))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("timer of %s: %w", id, err)
	}
	ms, err := strconv.ParseInt(msg.Header.Get(headerFireTime), 10, 64)
	if err != nil {
		return time.Time{}, nil // the schedule was not set by this service: replace it
	}
	return time.UnixMilli(ms), nil
}
