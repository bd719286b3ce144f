package eventlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/events"
)

// Scope says what Verify walks; the zero Scope is everything.
type Scope struct {
	Tenant  string // with Session: one session
	Session string
	// Heads are the signed heads of each shard that the log is compared with; nil for none.
	Heads []*heads.Chain
	// Accept are the positions of faults that are known: they are reported as accepted.
	Accept []Position
}

// maxProblems bounds the faults that a report lists. Verify stops when there are more.
const maxProblems = 1000

// Report is what Verify found.
type Report struct {
	Sessions int // with at least one commit
	Commits  int
	Events   int // over all sessions and catalogue entries
	// Open are the accepted queries without an end, in the order they were
	// accepted. An end may be still to come; after session_deleted none will.
	Open []OpenExecution
	// Problem is the first place where the log is not what it must be and that is not accepted,
	// nil if there is none.
	Problem *Problem
	// Problems are all such places, accepted or not, in the order they were found. One fault may have
	// others as a consequence, each at a commit of its own.
	Problems []Problem
	// Stopped reports whether there were too many faults, so that the rest was not looked at.
	Stopped bool
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
	Accepted bool
}

func (p *Problem) Error() string {
	return fmt.Sprintf("%s on %s (commit %s): %s", p.Position, p.Subject, p.CommitID, p.Why)
}

// Verify walks the log and checks all that can be known from it alone: hashes,
// chains, order, epochs, the ends of executions, nothing after a session's end,
// and that every payload is there and has its digest. It goes on after a fault, and
// takes the commit at fault as what the commits after it follow on. An error means that
// the log could not be read; what is wrong with it is in the report.
func Verify(ctx context.Context, l Log, scope Scope) (Report, error) {
	shards := l.Shards()
	first, last, filter := 0, shards-1, Filter{Foreign: true}
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
	v := Verifier{shards: shards, accept: scope.Accept, whole: scope.Session == ""}
	if scope.Heads != nil && len(scope.Heads) != shards {
		return Report{}, fmt.Errorf("verify: signed heads of %d shards, but the log has %d", len(scope.Heads), shards)
	}
	for shard := first; shard <= last && !v.full(); shard++ {
		if scope.Heads != nil {
			v.compareWith(scope.Heads[shard], filter.Subject)
		}
		if err := v.shard(ctx, l, shard, filter); err != nil {
			return v.Report(), fmt.Errorf("verify: %w", err)
		}
		v.endOfHeads(shard)
	}
	return v.Report(), nil
}

// shard adds the commits of one shard. A read ends at a commit that cannot be opened, and is begun again after it.
func (v *Verifier) shard(ctx context.Context, l Log, shard int, filter Filter) error {
	at := Position{Shard: shard}
	for {
		unreadable := false
		for rec, err := range l.Read(ctx, at, filter) {
			var foreign *ForeignError
			switch {
			case err == nil:
				v.Add(rec)
			case errors.As(err, &foreign):
				at, unreadable = rec.Position, true
				v.foreign(rec, foreign)
			case rec.Position.Seq == 0, errors.Is(err, ErrUnavailable), ctx.Err() != nil:
				return err
			default:
				at, unreadable = rec.Position, true
				v.unreadable(rec, err)
			}
			if unreadable || v.full() {
				break
			}
		}
		if !unreadable || v.full() {
			return nil
		}
	}
}

// Verifier checks commits one after the other. Those of one shard are added in
// order; the zero value is for a log of any number of shards.
type Verifier struct {
	shards   int // 0: not known
	last     map[int]uint64
	sessions map[sessionKey]*sessionCheck
	commits  int
	events   int
	problems []Problem
	accept   []Position
	whole    bool         // every commit of each shard is added
	heads    *heads.Check // of the present shard, nil for none
	missing  uint64       // stream sequences that no commit has, over all shards
	gapOf    Record       // the first commit after some of them
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
	commits    map[events.Aspect]uint64 // so far
	before     uint64                   // commits of life before session_deleted, of run before run_retired: those that are left
	removable  uint64                   // how many of them run_retired says there were
	retired    bool
	// suspects are the places where commits of the session are missing. They are
	// problems unless the session is deleted and retired: then they may be removed.
	suspects []Problem
}

type chain struct {
	begun bool
	hash  string // "" if the last commit could not be read: the next one may link to anything
}

type executionCheck struct {
	accepted Position
	end      events.Type // "" while it is open
	at       Position
}

// full reports whether no further fault is listed.
func (v *Verifier) full() bool { return len(v.problems) >= maxProblems }

// unreadable notes a commit that cannot be opened. A payload of a deleted session
// may be removed already while its commit is still there.
func (v *Verifier) unreadable(rec Record, err error) {
	s := v.session(rec)
	v.count(rec)
	if rec.Subject.Aspect != "" && errors.Is(err, ErrNotFound) {
		v.suspect(rec, s, err.Error())
	} else {
		v.fail(rec, err.Error())
	}
	v.last[rec.Position.Shard] = max(v.last[rec.Position.Shard], rec.Position.Seq)
	if v.heads != nil {
		v.heads.Skip(rec.Position.Seq)
	}
	v.ends(rec, s) // as far as its events are known
	if rec.Subject.Aspect != "" {
		s.chains[rec.Subject.Aspect] = chain{true, rec.Commit.Hash}
		s.commits[rec.Subject.Aspect]++
	}
}

// foreign notes a message that is not part of the log: the commits of its subject go on without it.
func (v *Verifier) foreign(rec Record, err *ForeignError) {
	v.begin()
	v.count(rec)
	rec.Commit = events.Commit{} // what it says of itself is not to be believed
	p := v.problem(rec, "is not part of the log: "+err.Reason)
	if p.Subject = err.Subject; !v.full() {
		v.problems = append(v.problems, p)
	}
	v.last[rec.Position.Shard] = max(v.last[rec.Position.Shard], rec.Position.Seq)
}

func (v *Verifier) begin() {
	if v.last == nil {
		v.last, v.sessions = map[int]uint64{}, map[sessionKey]*sessionCheck{}
	}
}

// session returns what is remembered of a commit's session.
func (v *Verifier) session(rec Record) *sessionCheck {
	v.begin()
	key := sessionKey{rec.Subject.Tenant, rec.Subject.ID}
	s := v.sessions[key]
	if s == nil {
		s = &sessionCheck{
			chains: map[events.Aspect]chain{}, ids: map[uint64]struct{}{}, executions: map[string]*executionCheck{}, commits: map[events.Aspect]uint64{},
		}
		v.sessions[key] = s
	}
	return s
}

// Add checks the next commit. Of a commit that is at fault in more than one way, the first is reported.
func (v *Verifier) Add(rec Record) {
	s := v.session(rec)
	v.commits++
	v.events += len(rec.Events)
	v.count(rec)
	var first string
	for _, check := range []func(Record, *sessionCheck) string{v.place, v.link, v.signedHead, v.once, v.ends} {
		if why := check(rec, s); why != "" && first == "" {
			first = why
		}
	}
	if first != "" {
		v.fail(rec, first)
	}
	v.last[rec.Position.Shard] = rec.Position.Seq
	s.chains[rec.Subject.Aspect] = chain{true, rec.Commit.Hash}
	s.commits[rec.Subject.Aspect]++
}

func (v *Verifier) fail(rec Record, why string) {
	if !v.full() {
		v.problems = append(v.problems, v.problem(rec, why))
	}
}

func (v *Verifier) problem(rec Record, why string) Problem {
	return Problem{
		Position: rec.Position, Subject: rec.Subject.String(), CommitID: rec.Commit.ID, Why: why, Accepted: slices.Contains(v.accept, rec.Position),
	}
}

// suspect notes what the removal of a deleted session's content may explain, once for each commit.
func (v *Verifier) suspect(rec Record, s *sessionCheck, why string) {
	n := len(s.suspects)
	if n < maxProblems && (n == 0 || s.suspects[n-1].Position != rec.Position) {
		s.suspects = append(s.suspects, v.problem(rec, why))
	}
}

// count notes the sequences that are missing before a commit.
func (v *Verifier) count(rec Record) {
	last := v.last[rec.Position.Shard]
	if v.whole && rec.Position.Seq > last+1 {
		if v.missing == 0 {
			v.gapOf = rec
		}
		v.missing += rec.Position.Seq - last - 1
	}
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

// link checks the hash and its link to the commit before, which is missing where
// the janitor removed it.
func (v *Verifier) link(rec Record, s *sessionCheck) string {
	c := rec.Commit
	if want := c.ComputeHash(rec.Subject); c.Hash != want {
		return fmt.Sprintf("its hash is %s, but its contents hash to %s", c.Hash, want)
	}
	if c.Command != "" && c.ID != events.Derive(events.KindCommit, c.Command) {
		return fmt.Sprintf("its id does not derive from its command %s", c.Command)
	}
	before := s.chains[rec.Subject.Aspect]
	switch {
	case !before.begun && c.Prev != "":
		v.suspect(rec, s, fmt.Sprintf("links to %s, which is missing before it", c.Prev))
	case before.begun && before.hash == "":
	case c.Prev != before.hash:
		v.suspect(rec, s, fmt.Sprintf("links to %q, but the commit before it has the hash %q", c.Prev, before.hash))
	}
	return ""
}

func isDeletion(e events.Event) bool { return e.Type() == events.SessionDeleted{}.EventType() }

// once checks that no commit and no event of the session is stored twice.
func (v *Verifier) once(rec Record, s *sessionCheck) string {
	var why string
	if !s.add(rec.Commit.ID) {
		why = "this commit id was stored before"
	}
	for _, e := range rec.Events {
		switch {
		case e.ID == "":
			why = cmp.Or(why, fmt.Sprintf("its %s has no id", e.Type()))
		case !s.add(e.ID):
			why = cmp.Or(why, fmt.Sprintf("%s %s was stored before", e.Type(), e.ID))
		}
	}
	return why
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
	var why string
	if rec.Subject.Aspect == events.Life && s.deleted {
		why = "the session was deleted before"
	}
	if rec.Subject.Aspect == events.Run {
		if rec.Commit.Epoch < s.epoch {
			why = fmt.Sprintf("was written under epoch %d, after epoch %d", rec.Commit.Epoch, s.epoch)
		}
		s.epoch = max(s.epoch, rec.Commit.Epoch)
	}
	for i, e := range rec.Events {
		if isDeletion(e) {
			if i != len(rec.Events)-1 {
				why = cmp.Or(why, "session_deleted is not its last event")
			}
			s.deleted = true
			s.before += s.commits[events.Life]
		}
		why = cmp.Or(why, s.retire(e), v.execution(rec, s, e))
	}
	return why
}

// retire checks that run_retired comes after session_deleted, and that only content_removed follows it.
func (s *sessionCheck) retire(e events.Event) string {
	switch d := e.Data.(type) {
	case events.RunRetired:
		if !s.deleted {
			return "run_retired of a session that was not deleted before"
		}
		if s.retired {
			return "the session was retired before"
		}
		s.retired, s.removable = true, uint64(d.Life)+uint64(d.Runs)
		s.before += s.commits[events.Run]
		return ""
	case events.ContentRemoved:
		if !s.retired {
			return "content_removed of a session that was not retired before"
		}
		return ""
	}
	if s.retired {
		return fmt.Sprintf("%s after run_retired", e.Type())
	}
	return ""
}

// execution checks one event of an execution. One that is accepted a second time is at fault there alone: from then on
// it is expected to end once more.
func (v *Verifier) execution(rec Record, s *sessionCheck, e events.Event) string {
	at := rec.Position
	x := s.executions[e.ExecutionID]
	switch {
	case e.Type() == events.MessageAccepted{}.EventType():
		if x != nil {
			before := x.accepted
			*x = executionCheck{accepted: at}
			return fmt.Sprintf("execution %s was accepted before, at %s", e.ExecutionID, before)
		}
		s.executions[e.ExecutionID] = &executionCheck{accepted: at}
		s.order = append(s.order, e.ExecutionID)
	case events.Terminal(e.Type()) && x == nil:
		v.suspect(rec, s, fmt.Sprintf("%s of execution %s, which was never accepted", e.Type(), e.ExecutionID))
	case events.Terminal(e.Type()) && x.end != "":
		return fmt.Sprintf("%s of execution %s, which ended with %s at %s", e.Type(), e.ExecutionID, x.end, x.at)
	case events.Terminal(e.Type()):
		x.end, x.at = e.Type(), at
	}
	return ""
}

// explain lists what was found, with what is missing and no deleted session explains.
func (v *Verifier) explain() []Problem {
	list := slices.Clone(v.problems)
	at := map[Position]bool{}
	for _, p := range list {
		at[p.Position] = true
	}
	var explained uint64
	holes := false
	for _, s := range v.sessions {
		if s.retired {
			explained += s.removable - min(s.removable, s.before)
			continue
		}
		holes = holes || len(s.suspects) > 0
		for _, p := range s.suspects {
			if !at[p.Position] { // of a commit that is at fault in more than one way, one is reported
				list = append(list, p)
			}
		}
	}
	if !holes && v.missing > explained { // else the places are known
		list = append(list, v.problem(v.gapOf, fmt.Sprintf("%d sequences of the log are missing, and deleted sessions explain %d; the first are before it", v.missing, explained)))
	}
	slices.SortStableFunc(list, func(a, b Problem) int { return a.Position.compare(b.Position) })
	return list[:min(len(list), maxProblems)]
}

func (p Position) compare(o Position) int {
	return cmp.Or(cmp.Compare(p.Shard, o.Shard), cmp.Compare(p.Seq, o.Seq))
}

// Report is what was found so far.
func (v *Verifier) Report() Report {
	r := Report{Commits: v.commits, Events: v.events, Problems: v.explain(), Stopped: v.full()}
	if i := slices.IndexFunc(r.Problems, func(p Problem) bool { return !p.Accepted }); i >= 0 {
		r.Problem = &r.Problems[i]
	}
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
		return a.Position.compare(b.Position)
	})
	return r
}
