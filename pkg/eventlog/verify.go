package eventlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Scope says what Verify walks; the zero Scope is everything.
type Scope struct {
	Tenant  string // with Session: one session
	Session string
}

// Report is what Verify found.
type Report struct {
	Sessions int // with at least one commit
	Commits  int
	Events   int // over all sessions and catalogue entries
	// Open are the accepted queries without an end, in the order they were
	// accepted. An end may be still to come; after session_deleted none will.
	Open []OpenExecution
	// Problem is the first place where the log is not what it must be, nil if it
	// is sound. What comes after it in its shard, and the shards after, were not looked at.
	Problem *Problem
}

// OpenExecution is an accepted query that has no terminal event.
type OpenExecution struct {
	Tenant      string
	Session     string
	ExecutionID string
	Position    Position // of its message_accepted
	Deleted     bool     // its session is deleted
}

// Problem is a place where the log is broken.
type Problem struct {
	Position Position
	Subject  string
	CommitID string
	Why      string
}

func (p *Problem) Error() string {
	return fmt.Sprintf("%s on %s (commit %s): %s", p.Position, p.Subject, p.CommitID, p.Why)
}

// Verify walks the log and checks all that can be known from it alone: hashes,
// chains, order, epochs, the ends of executions, nothing after a session's end,
// and that every payload is there and has its digest. An error means that the
// log could not be read; what is wrong with it is in the report.
func Verify(ctx context.Context, l Log, scope Scope) (Report, error) {
	shards := l.Shards()
	first, last, filter := 0, shards-1, Filter{}
	if scope.Session != "" {
		s := events.LifeOf(scope.Tenant, scope.Session)
		if err := s.Check(); err != nil {
			return Report{}, fmt.Errorf("verify: %w", err)
		}
		filter.Subject = events.Subject{Tenant: scope.Tenant, ID: scope.Session}
		first, last = s.Partition()%shards, s.Partition()%shards
	} else if scope.Tenant != "" {
		return Report{}, fmt.Errorf("verify: tenant %s without a session: name one, or neither", scope.Tenant)
	}
	v := Verifier{shards: shards}
	for shard := first; shard <= last; shard++ {
		for rec, err := range l.Read(ctx, Position{Shard: shard}, filter) {
			if err != nil && (rec.Position.Seq == 0 || errors.Is(err, ErrUnavailable)) {
				return v.Report(), fmt.Errorf("verify: %w", err)
			}
			if err != nil {
				v.fail(rec, err.Error())
			} else {
				v.Add(rec)
			}
			if v.problem != nil {
				return v.Report(), nil
			}
		}
	}
	return v.Report(), nil
}

// Verifier checks commits one after the other. Those of one shard are added in
// order; the zero value is for a log of any number of shards.
type Verifier struct {
	shards   int // 0: not known
	last     map[int]uint64
	sessions map[sessionKey]*sessionCheck
	commits  int
	events   int
	problem  *Problem
}

type sessionKey struct{ tenant, id string }

// sessionCheck is what must be remembered of a session, or of a catalogue entry.
type sessionCheck struct {
	chains     map[events.Aspect]chain
	ids        map[uint64]struct{} // hashes of the ids of commits and events: a repeated one was stored twice
	executions map[string]*executionCheck
	order      []string // executions as they were accepted
	deleted    bool
	epoch      uint64
}

type chain struct {
	begun bool
	hash  string
}

type executionCheck struct {
	accepted Position
	end      events.Type // "" while it is open
	at       Position
}

// Add checks the next commit. Once a problem was found it does nothing.
func (v *Verifier) Add(rec Record) {
	if v.problem != nil {
		return
	}
	if v.last == nil {
		v.last, v.sessions = map[int]uint64{}, map[sessionKey]*sessionCheck{}
	}
	key := sessionKey{rec.Subject.Tenant, rec.Subject.ID}
	s := v.sessions[key]
	if s == nil {
		s = &sessionCheck{chains: map[events.Aspect]chain{}, ids: map[uint64]struct{}{}, executions: map[string]*executionCheck{}}
		v.sessions[key] = s
	}
	v.commits++
	v.events += len(rec.Events)
	for _, check := range []func(Record, *sessionCheck) string{v.place, v.link, v.once, v.ends} {
		if why := check(rec, s); why != "" {
			v.fail(rec, why)
			return
		}
	}
	v.last[rec.Position.Shard] = rec.Position.Seq
	s.chains[rec.Subject.Aspect] = chain{true, rec.Commit.Hash}
}

func (v *Verifier) fail(rec Record, why string) {
	v.problem = &Problem{Position: rec.Position, Subject: rec.Subject.String(), CommitID: rec.Commit.ID, Why: why}
}

// place checks the order in the shard, and that the shard is the subject's.
func (v *Verifier) place(rec Record, _ *sessionCheck) string {
	if last := v.last[rec.Position.Shard]; rec.Position.Seq <= last {
		return fmt.Sprintf("comes after sequence %d of its shard", last)
	}
	if v.shards > 0 && rec.Subject.Partition()%v.shards != rec.Position.Shard {
		return fmt.Sprintf("partition %d does not lie in shard %d of %d", rec.Subject.Partition(), rec.Position.Shard, v.shards)
	}
	if len(rec.Events) == 0 {
		return "has no events"
	}
	return ""
}

// link checks the hash and its link to the commit before. The commits before
// session_deleted may have been purged: it is the one that may begin a chain.
func (v *Verifier) link(rec Record, s *sessionCheck) string {
	c := rec.Commit
	if want := c.ComputeHash(rec.Subject); c.Hash != want {
		return fmt.Sprintf("its hash is %s, but its contents hash to %s", c.Hash, want)
	}
	before := s.chains[rec.Subject.Aspect]
	if !before.begun && c.Prev != "" {
		if slices.ContainsFunc(rec.Events, isDeletion) {
			return ""
		}
		return fmt.Sprintf("links to %s, which is missing before it", c.Prev)
	}
	if c.Prev != before.hash {
		return fmt.Sprintf("links to %q, but the commit before it has the hash %q", c.Prev, before.hash)
	}
	return ""
}

func isDeletion(e events.Event) bool { return e.Type() == events.SessionDeleted{}.EventType() }

// once checks that no commit and no event of the session is stored twice.
func (v *Verifier) once(rec Record, s *sessionCheck) string {
	if !s.add(rec.Commit.ID) {
		return "this commit id was stored before"
	}
	for _, e := range rec.Events {
		if e.ID == "" {
			return fmt.Sprintf("its %s has no id", e.Type())
		}
		if !s.add(e.ID) {
			return fmt.Sprintf("%s %s was stored before", e.Type(), e.ID)
		}
	}
	return ""
}

// add remembers an id by its 64-bit hash, since all ids of a large log would not
// fit in memory; it tells whether the id is new.
func (s *sessionCheck) add(id string) bool {
	h := fnv.New64a()
	h.Write([]byte(id)) // never fails
	n := len(s.ids)
	s.ids[h.Sum64()] = struct{}{}
	return len(s.ids) > n
}

// ends checks what a session's events say together: epochs that never go back,
// one end at most for each accepted query, nothing on life after the session's end.
func (v *Verifier) ends(rec Record, s *sessionCheck) string {
	if rec.Subject.Aspect == events.Life && s.deleted {
		return "the session was deleted before"
	}
	if rec.Subject.Aspect == events.Run {
		if rec.Commit.Epoch < s.epoch {
			return fmt.Sprintf("was written under epoch %d, after epoch %d", rec.Commit.Epoch, s.epoch)
		}
		s.epoch = rec.Commit.Epoch
	}
	for i, e := range rec.Events {
		if isDeletion(e) {
			if i != len(rec.Events)-1 {
				return "session_deleted is not its last event"
			}
			s.deleted = true
		}
		if why := s.execution(e, rec.Position); why != "" {
			return why
		}
	}
	return ""
}

func (s *sessionCheck) execution(e events.Event, at Position) string {
	x := s.executions[e.ExecutionID]
	switch {
	case e.Type() == events.MessageAccepted{}.EventType():
		if x != nil {
			return fmt.Sprintf("execution %s was accepted before, at %s", e.ExecutionID, x.accepted)
		}
		s.executions[e.ExecutionID] = &executionCheck{accepted: at}
		s.order = append(s.order, e.ExecutionID)
	case events.Terminal(e.Type()) && x == nil:
		return fmt.Sprintf("%s of execution %s, which was never accepted", e.Type(), e.ExecutionID)
	case events.Terminal(e.Type()) && x.end != "":
		return fmt.Sprintf("%s of execution %s, which ended with %s at %s", e.Type(), e.ExecutionID, x.end, x.at)
	case events.Terminal(e.Type()):
		x.end, x.at = e.Type(), at
	}
	return ""
}

// Report is what was found so far.
func (v *Verifier) Report() Report {
	r := Report{Commits: v.commits, Events: v.events, Problem: v.problem}
	for key, s := range v.sessions {
		if s.chains[events.Life].begun || s.chains[events.Run].begun {
			r.Sessions++
		}
		for _, id := range s.order {
			if x := s.executions[id]; x.end == "" {
				r.Open = append(r.Open, OpenExecution{key.tenant, key.id, id, x.accepted, s.deleted})
			}
		}
	}
	// Stable, since the queries of one commit are in order already.
	slices.SortStableFunc(r.Open, func(a, b OpenExecution) int {
		return cmp.Or(cmp.Compare(a.Position.Shard, b.Position.Shard), cmp.Compare(a.Position.Seq, b.Position.Seq))
	})
	return r
}
