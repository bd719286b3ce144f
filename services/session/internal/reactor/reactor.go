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

// Leases reports which engines and executors are alive.
type Leases interface {
	// EngineGoneFor returns the time for which no executor of an engine has renewed a lease.
	EngineGoneFor(provider, engine string) time.Duration
	// Lives reports whether an executor has a lease.
	HasLease(ctx context.Context, executor string) (bool, error)
}

// Budgets reads the budgets and limits of tenants, and their usage.
type Budgets interface {
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
}

// Config configures a Reactor. Every field is required.
type Config struct {
	Sessions  eventlog.Sessions
	JetStream jetstream.JetStream
	Publisher message.Publisher // deduplicates by message id
	Leases    Leases
	Budgets   Budgets
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

// Reactor does what commits and timers make due for a session: it appends events, publishes jobs and sets the session's
// timer.
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

// maxRounds is the maximum number of times that a session's state is loaded again for one message because another
// writer changed it meanwhile. After that the message is redelivered.
const maxRounds = 32

// errMoving is returned if other writers changed a session's state during each of maxRounds attempts.
var errMoving = errors.New("the session's state keeps changing")

// Commit handles a message of the log.
func (r *Reactor) Commit(ctx context.Context, msg *message.Message) error {
	if err := bus.Routed(ctx); err != nil {
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
	c, err := summarize(msg.Payload)
	if err != nil {
		return bus.Poison(err)
	}
	if !c.matters {
		return nil
	}
	l, err := r.settle(ctx, subject.Tenant, subject.ID)
	if err != nil {
		return err
	}
	if l.Life.Secrets {
		if err := r.forget(ctx, subject, bus.Sequence(msg), c.ended); err != nil {
			return err
		}
	}
	if len(c.ended) > 0 {
		r.cfg.Ended(subject.Tenant, subject.ID)
	}
	r.cfg.Reacted(r.cfg.Now().Sub(bus.Stored(msg)))
	return nil
}

// forget removes the secrets of executions that have ended according to a message, if the message is part of the log.
// Elsewhere the reactor uses a message only as a reason to load the state.
func (r *Reactor) forget(ctx context.Context, s events.Subject, seq uint64, ended []string) error {
	if len(ended) == 0 {
		return nil
	}
	_, err := r.cfg.Sessions.Log.At(ctx, r.cfg.Sessions.Position(s.ID, seq))
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

// commitSummary is the part of a session's commit that decides whether the Reactor has to act on the commit.
type commitSummary struct {
	matters bool     // the commit can make something due
	ended   []string // executions that it ends
}

// summarize reads a commit without decoding the data of its events.
func summarize(payload []byte) (commitSummary, error) {
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
		entry, known := events.Lookup(e.Type)
		if events.Terminal(e.Type) {
			g.ended = append(g.ended, e.ExecutionID)
		}
		switch e.Type {
		case events.ExecutionClaimed{}.EventType(), events.SandboxReady{}.EventType(), events.SandboxCreating{}.EventType(),
			events.ExecutionPaused{}.EventType(), events.ExecutionResumed{}.EventType(),
			events.ApprovalResolved{}.EventType(), events.ApprovalRetracted{}.EventType(): // the turn limit runs again
			g.matters = true
		}
		g.matters = g.matters || known && (entry.Aspect == events.Life || events.Terminal(e.Type))
	}
	return g, nil
}

// Timer handles a timer that fired. It acts on everything that is due now, and not only on the deadline for which the
// timer was set.
func (r *Reactor) Timer(ctx context.Context, msg *message.Message) error {
	if err := bus.Routed(ctx); err != nil {
		return err
	}
	ref, err := topology.DecodeSessionRef(msg.Payload)
	if err != nil {
		return bus.Poison(err)
	}
	_, err = r.settle(ctx, ref.Tenant, ref.Session)
	return err
}

// settle loads the session and does one thing that is due, until nothing is due.
// A conflict means that another writer did it first. It returns the session as
// it was loaded last.
func (r *Reactor) settle(ctx context.Context, tenant, id string) (*eventlog.Loaded, error) {
	for range maxRounds {
		l, err := r.cfg.Sessions.Load(ctx, tenant, id, eventlog.Leader)
		if err != nil {
			return l, bus.Transient(err)
		}
		wrote, err := r.appendNext(ctx, l)
		var conflict *eventlog.ConflictError
		switch {
		case errors.As(err, &conflict), err == nil && wrote:
			continue
		case err != nil:
			return l, bus.Transient(err)
		}
		if err := r.publish(ctx, l); err != nil {
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
	return nil, errMoving
}

// appendNext appends the one thing that is due on the log itself, if anything is.
func (r *Reactor) appendNext(ctx context.Context, l *eventlog.Loaded) (wrote bool, err error) {
	now := r.cfg.Now()
	base := func(what string) session.Base {
		return session.Base{Meta: events.Meta{CommandID: events.Derive(events.KindCommand, what, l.ID, l.LifeHead.Hash, l.RunHead.Hash), Now: now}}
	}
	for _, c := range []session.Command{
		session.Expire{Base: base("expire"), Run: l.View()},
		session.Advance{Base: base("advance"), ActiveEnded: l.View().ActiveEnded},
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
	outcome, err := r.lostEnd(ctx, l, now)
	if err != nil || outcome == nil {
		return false, err
	}
	return true, r.abandon(ctx, l, outcome, now)
}

// lostEnd returns the terminal event of the active execution if no executor will end it, else nil: if it was cancelled
// before an executor claimed it, if a budget or a limit that it needs is used up, or if its turn limit has passed and
// its executor is gone.
func (r *Reactor) lostEnd(ctx context.Context, l *eventlog.Loaded, now time.Time) (events.Payload, error) {
	active := l.Life.Active.ExecutionID
	if l.Due() == run.Refuse {
		return events.ExecutionCancelled{Reason: l.Life.ControlOf(active).Reason}, nil
	}
	if l.Due() == run.Execute && l.Run.Execution != active {
		if outcome, err := r.budgetEnd(ctx, l, now); err != nil || outcome != nil {
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

// budgetEnd returns the terminal event of the session's next execution if a budget, or the tenant's limit of events,
// prevents its start.
func (r *Reactor) budgetEnd(ctx context.Context, l *eventlog.Loaded, now time.Time) (events.Payload, error) {
	const code = "BUDGET_EXCEEDED"
	if why := l.Life.Options.Budget.Exceeded(l.Run.SessionUsage(), "the session"); why != "" {
		return events.ExecutionFailed{Code: code, Message: why}, nil
	}
	t, err := r.cfg.Budgets.Get(ctx, l.Tenant)
	if err != nil {
		return nil, err
	}
	if why := t.ExceededBudget(l.Tenant, now); why != "" {
		return events.ExecutionFailed{Code: code, Message: why}, nil
	}
	if why := t.ExceededEventLimit(l.Tenant, now); why != "" {
		return events.ExecutionFailed{Code: events.CodeTenantEvents, Message: why}, nil
	}
	return nil, nil
}

// isOverdue reports whether the active execution has run longer than its turn limit and grace.
func (r *Reactor) isOverdue(l *eventlog.Loaded, now time.Time) bool {
	at, ok := l.Life.TurnDeadline(l.View())
	return ok && !now.Before(at)
}

// abandon ends the active execution. The session service cannot reach sandboxes, so the end of
// an execution that an executor held states that its agent was not stopped.
func (r *Reactor) abandon(ctx context.Context, l *eventlog.Loaded, outcome events.Payload, now time.Time) error {
	if failed, ok := outcome.(events.ExecutionFailed); ok && l.Run.Execution == l.Life.Active.ExecutionID && l.Run.Sandbox.Journal != "" {
		outcome = failed.NotStopped(errors.New("no executor holds the execution; the next sweep of an executor of its engine stops it"))
	}
	blocks, err := r.cfg.Sessions.OpenBlocks(ctx, l.ID, l.Run.Open)
	if err != nil {
		return err
	}
	id := events.Derive(events.KindCommand, "abandon", l.Life.Active.ExecutionID, l.RunHead.Hash)
	d, err := run.Decide(l.Run, run.Abandon{
		Meta: events.Meta{CommandID: id, Now: now}, ExecutionID: l.Life.Active.ExecutionID, Turn: l.Life.Active.Turn, By: r.actor().ID, Outcome: outcome, Blocks: blocks,
	})
	if errors.Is(err, run.ErrEnded) {
		return nil
	}
	if err != nil {
		return err
	}
	return r.cfg.Sessions.AppendRun(ctx, l, r.actor(), events.Derive(events.KindCommit, id), d)
}

// publish stores the job that is due in JOBS, under its run.JobID, so that the queue holds it once.
func (r *Reactor) publish(ctx context.Context, l *eventlog.Loaded) error {
	id := run.JobID(&l.Life, &l.Run)
	if id == "" {
		return nil
	}
	return r.putJob(ctx, l, id)
}

// putJob stores a job for a session in JOBS.
func (r *Reactor) putJob(ctx context.Context, l *eventlog.Loaded, id string) error {
	subject := topology.JobAny(l.Life.Provider)
	if box := l.Run.Sandbox; box.Engine != "" && r.cfg.Leases.EngineGoneFor(box.Provider, box.Engine) < r.cfg.EngineGone {
		subject = topology.JobOn(box.Provider, box.Engine)
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
func (r *Reactor) armTimer(ctx context.Context, l *eventlog.Loaded) (moved bool, err error) {
	at, ok := l.Life.Deadline(l.View())
	if !ok {
		return false, nil
	}
	now := r.cfg.Now()
	if !at.After(now) {
		// The turn is overdue, but its executor is alive. Check it again after TurnGrace.
		at = now.Add(session.TurnGrace)
	}
	armed, err := r.timerTime(ctx, l.ID)
	if err != nil {
		return false, err
	}
	if armed.After(now) && !armed.After(at) {
		return false, nil
	}
	if err := r.schedule(ctx, l, at); err != nil {
		return false, err
	}
	again, err := r.cfg.Sessions.Load(ctx, l.Tenant, l.ID, eventlog.Leader)
	if err != nil {
		return false, err
	}
	return again.LifeHead.Seq != l.LifeHead.Seq || again.RunHead.Seq != l.RunHead.Seq, nil
}

// timerStream returns TIMERS. It keeps the handle, because getting one is a round trip to the stream's leader.
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

// headerArmedAt holds the time at which a schedule fires, in Unix milliseconds.
const headerArmedAt = "Spool-Armed-At"

// timerTime returns the time at which the session's timer fires, or the zero time if none is set.
func (r *Reactor) timerTime(ctx context.Context, id string) (time.Time, error) {
	stream, err := r.timerStream(ctx)
	if err != nil {
		return time.Time{}, err
	}
	msg, err := stream.GetLastMsgForSubject(ctx, topology.TimerSchedule(id))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("timer of %s: %w", id, err)
	}
	ms, err := strconv.ParseInt(msg.Header.Get(headerArmedAt), 10, 64)
	if err != nil {
		return time.Time{}, nil // the schedule was not set by this service: replace it
	}
	return time.UnixMilli(ms), nil
}
