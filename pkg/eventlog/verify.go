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

// VerifyScope selects what Verify checks. The zero VerifyScope is the whole log.
type VerifyScope struct {
	Tenant  string // must be set together with Session
	Session string
	// Heads are the signed heads of each shard to compare the log with; nil for none.
	Heads []*heads.Chain
	// Accept lists the positions of known problems, which the report marks as accepted.
	Accept []Position
}

// maxProblems is the maximum number of problems in a report. Verify stops when it is reached.
const maxProblems = 1000

// VerifyReport is the result of Verify: counts, open executions and problems.
type VerifyReport struct {
	Sessions int // with at least one commit
	Commits  int
	Events   int // over all sessions and catalogue entries
	// Open lists the accepted queries without an end, in the order of their acceptance. Their end may still come,
	// unless the session is deleted.
	Open []OpenExecution
	// Problem is the first problem that is not accepted; nil if there is none.
	Problem *LogProblem
	// Problems lists all problems, accepted or not, in the order in which they were found. One fault may cause
	// further problems at later commits.
	Problems []LogProblem
	// Stopped reports whether Verify stopped because of too many problems and did not check the rest.
	Stopped bool
	// Uncounted lists the run_retired events whose counts of commits cannot be true. Earlier builds wrote such counts.
	Uncounted []Position
	// Undecided is the number of missing commits that no count explains, but that the sessions of Uncounted may have
	// had. Commits that the signed heads cover are never undecided.
	Undecided uint64
}

// OpenExecution is an execution that has no terminal event in the log.
type OpenExecution struct {
	Tenant      string
	Session     string
	ExecutionID string
	Position    Position // of its message_accepted event
	Deleted     bool     // the session is deleted
}

// LogProblem is a position at which the log is invalid, and the reason.
type LogProblem struct {
	Position Position
	Subject  string
	CommitID string
	Why      string
	Accepted bool
}

func (p *LogProblem) Error() string {
	return fmt.Sprintf("%s on %s (commit %s): %s", p.Position, p.Subject, p.CommitID, p.Why)
}

// Verify reads the log and checks everything that follows from the log alone: hashes, chains, order, epochs, the
// ends of executions, that nothing follows the end of a session, and that every payload exists and matches its
// digest. It continues after a problem, and accepts the invalid commit as the predecessor of the next one. An error
// means that the log could not be read; problems of its content are in the report.
func Verify(ctx context.Context, l Log, scope VerifyScope) (VerifyReport, error) {
	shards := l.Shards()
	first, last, filter := 0, shards-1, Filter{Foreign: true}
	if scope.Session != "" {
		s := events.LifeSubject(scope.Tenant, scope.Session)
		if err := s.Check(); err != nil {
			return VerifyReport{}, fmt.Errorf("verify: %w", err)
		}
		filter.Subject = events.Subject{Tenant: scope.Tenant, ID: scope.Session}
		first, last = s.Partition()%shards, s.Partition()%shards
	} else if scope.Tenant != "" {
		return VerifyReport{}, fmt.Errorf("verify: tenant %s requires a session: set both or neither", scope.Tenant)
	}
	v := Verifier{shards: shards, accept: scope.Accept, whole: scope.Session == ""}
	if scope.Heads != nil && len(scope.Heads) != shards {
		return VerifyReport{}, fmt.Errorf("verify: signed heads of %d shards, but the log has %d", len(scope.Heads), shards)
	}
	for shard := first; shard <= last && !v.isReportFull(); shard++ {
		if scope.Heads != nil {
			v.startHeadComparison(scope.Heads[shard], filter.Subject)
		}
		if err := v.verifyShard(ctx, l, shard, filter); err != nil {
			return v.Report(), fmt.Errorf("verify: %w", err)
		}
		v.endHeadComparison(shard)
	}
	return v.Report(), nil
}

// verifyShard checks the commits of one shard. A read ends at a commit that cannot be opened, and a new read starts after
// it.
func (v *Verifier) verifyShard(ctx context.Context, l Log, shard int, filter Filter) error {
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
				v.addForeign(rec, foreign)
			case rec.Position.Seq == 0, errors.Is(err, ErrUnavailable), ctx.Err() != nil:
				return err
			default:
				at, unreadable = rec.Position, true
				v.addUnreadable(rec, err)
			}
			if unreadable || v.isReportFull() {
				break
			}
		}
		if !unreadable || v.isReportFull() {
			return nil
		}
	}
}

// Verifier checks commits one by one. The commits of one shard must be added in order. The zero value checks a log
// with any number of shards.
type Verifier struct {
	shards   int // 0 if unknown
	last     map[int]uint64
	sessions map[sessionKey]*sessionCheck
	commits  int
	events   int
	problems []LogProblem
	accept   []Position
	whole    bool              // every commit of each shard is added
	heads    *heads.Comparison // comparison of the current shard; nil for none
	missing  uint64            // number of stream sequences without a commit, over all shards
	proved   uint64            // sequence of the current shard up to which signed heads cover every commit
	unproved uint64            // number of those of missing that no signed heads cover
	afterGap Record            // the first commit after a gap
}

// sessionKey is the tenant and the id of a session or catalogue entry.
type sessionKey struct{ tenant, id string }

// sessionCheck is the state of the check for one session or catalogue entry.
type sessionCheck struct {
	chains     map[events.Aspect]subjectCheck
	ids        map[uint64]struct{} // hashes of the ids of commits and events, to detect duplicates
	executions map[string]*executionCheck
	order      []string // execution ids in the order of their acceptance
	deleted    bool
	epoch      uint64
	commits    map[events.Aspect]uint64 // number of commits so far
	before     uint64                   // number of remaining commits of life before session_deleted and of run before run_retired
	removable  uint64                   // number of those commits according to run_retired, or at least that number if uncounted is set
	retired    bool
	uncounted  Position // of run_retired, if its counts cannot be true
	// suspects are positions at which commits of the session are missing. They are problems unless the session is
	// deleted and retired, because its commits may then have been removed.
	suspects []LogProblem
}

// subjectCheck is the state of the check for one subject.
type subjectCheck struct {
	begun bool
	hash  string // "" if the last commit could not be read: then any link is accepted
	v     int    // the newest commit version so far
}

// executionCheck is the state of the check for one execution.
type executionCheck struct {
	accepted Position
	end      events.Type // "" while it is open
	at       Position    // of its end
}

// isReportFull reports whether the report has no room for further problems.
func (v *Verifier) isReportFull() bool { return len(v.problems) >= maxProblems }

// addUnreadable records a commit that cannot be opened. The payloads of a deleted session are removed before its
// commits.
func (v *Verifier) addUnreadable(rec Record, err error) {
	s := v.sessionOf(rec)
	v.countMissingSequences(rec)
	if rec.Subject.Aspect != "" && errors.Is(err, ErrNotFound) {
		v.addSuspectProblem(rec, s, err.Error())
	} else {
		v.addProblem(rec, err.Error())
	}
	v.last[rec.Position.Shard] = max(v.last[rec.Position.Shard], rec.Position.Seq)
	if v.heads != nil {
		v.heads.AddUnreadable(rec.Position.Seq)
	}
	v.checkEvents(rec, s) // as far as its events are known
	if rec.Subject.Aspect != "" {
		s.chains[rec.Subject.Aspect] = subjectCheck{true, rec.Commit.Hash, s.chains[rec.Subject.Aspect].v}
		s.commits[rec.Subject.Aspect]++
	}
}

// addForeign records a message that is not part of the log. The chain of its subject continues without it.
func (v *Verifier) addForeign(rec Record, err *ForeignError) {
	v.initialize()
	v.countMissingSequences(rec)
	rec.Commit = events.Commit{} // the content of a foreign message cannot be trusted
	p := v.newProblem(rec, "is not part of the log: "+err.Reason)
	if p.Subject = err.Subject; !v.isReportFull() {
		v.problems = append(v.problems, p)
	}
	v.last[rec.Position.Shard] = max(v.last[rec.Position.Shard], rec.Position.Seq)
}

// initialize makes the zero Verifier usable.
func (v *Verifier) initialize() {
	if v.last == nil {
		v.last, v.sessions = map[int]uint64{}, map[sessionKey]*sessionCheck{}
	}
}

// sessionOf returns the check state of a commit's session.
func (v *Verifier) sessionOf(rec Record) *sessionCheck {
	v.initialize()
	key := sessionKey{rec.Subject.Tenant, rec.Subject.ID}
	s := v.sessions[key]
	if s == nil {
		s = &sessionCheck{
			chains: map[events.Aspect]subjectCheck{}, ids: map[uint64]struct{}{}, executions: map[string]*executionCheck{}, commits: map[events.Aspect]uint64{},
		}
		v.sessions[key] = s
	}
	return s
}

// Add checks the next commit. If a commit has several problems, only the first is reported.
func (v *Verifier) Add(rec Record) {
	s := v.sessionOf(rec)
	v.commits++
	v.events += len(rec.Events)
	v.countMissingSequences(rec)
	var first string
	for _, check := range []func(Record, *sessionCheck) string{v.checkOrder, v.checkChainLink, v.checkSignedHead, v.checkUnique, v.checkEvents} {
		if why := check(rec, s); why != "" && first == "" {
			first = why
		}
	}
	if first != "" {
		v.addProblem(rec, first)
	}
	v.last[rec.Position.Shard] = rec.Position.Seq
	s.chains[rec.Subject.Aspect] = subjectCheck{true, rec.Commit.Hash, max(rec.Commit.V, s.chains[rec.Subject.Aspect].v)}
	s.commits[rec.Subject.Aspect]++
}

// addProblem adds a problem to the report if the report has room for it.
func (v *Verifier) addProblem(rec Record, why string) {
	if !v.isReportFull() {
		v.problems = append(v.problems, v.newProblem(rec, why))
	}
}

// newProblem returns a LogProblem at the position of a commit.
func (v *Verifier) newProblem(rec Record, why string) LogProblem {
	return LogProblem{
		Position: rec.Position, Subject: rec.Subject.String(), CommitID: rec.Commit.ID, Why: why, Accepted: slices.Contains(v.accept, rec.Position),
	}
}

// addSuspectProblem records a problem that the removal of a deleted session's content may explain, at most one per commit.
func (v *Verifier) addSuspectProblem(rec Record, s *sessionCheck, why string) {
	n := len(s.suspects)
	if n < maxProblems && (n == 0 || s.suspects[n-1].Position != rec.Position) {
		s.suspects = append(s.suspects, v.newProblem(rec, why))
	}
}

// checkOrder checks the order in the shard, and that the subject belongs to the shard.
func (v *Verifier) checkOrder(rec Record, _ *sessionCheck) string {
	if last := v.last[rec.Position.Shard]; rec.Position.Seq <= last {
		return fmt.Sprintf("comes after sequence %d of its shard", last)
	}
	if v.shards > 0 && rec.Subject.Partition()%v.shards != rec.Position.Shard {
		return fmt.Sprintf("partition %d is not in shard %d of %d", rec.Subject.Partition(), rec.Position.Shard, v.shards)
	}
	if len(rec.Events) == 0 {
		return "has no events"
	}
	return ""
}

// checkChainLink checks the hash of a commit and its link to the previous commit. A previous commit that the janitor removed
// makes the commit only suspect.
func (v *Verifier) checkChainLink(rec Record, s *sessionCheck) string {
	c := rec.Commit
	if want := c.ComputeHash(rec.Subject); c.Hash != want {
		return fmt.Sprintf("its hash is %s, but its contents hash to %s", c.Hash, want)
	}
	if c.Command != "" && c.ID != events.DeriveID(events.KindCommit, c.Command) {
		return fmt.Sprintf("id is not derived from the command %s", c.Command)
	}
	before := s.chains[rec.Subject.Aspect]
	if c.V < before.v {
		return fmt.Sprintf("has version %d, after a commit of version %d", c.V, before.v)
	}
	switch {
	case !before.begun && c.Prev != "":
		v.addSuspectProblem(rec, s, fmt.Sprintf("links to %s, which is missing before it", c.Prev))
	case before.begun && before.hash == "":
	case c.Prev != before.hash:
		v.addSuspectProblem(rec, s, fmt.Sprintf("links to %q, but the commit before it has the hash %q", c.Prev, before.hash))
	}
	return ""
}

// isDeletion reports whether an event is session_deleted.
func isDeletion(e events.Event) bool { return e.Type() == events.SessionDeleted{}.EventType() }

// checkUnique checks that no commit and no event of the session is stored twice.
func (v *Verifier) checkUnique(rec Record, s *sessionCheck) string {
	var why string
	if !s.addID(rec.Commit.ID) {
		why = "this commit id was stored before"
	}
	for _, e := range rec.Events {
		switch {
		case e.ID == "":
			why = cmp.Or(why, fmt.Sprintf("its %s has no id", e.Type()))
		case !s.addID(e.ID):
			why = cmp.Or(why, fmt.Sprintf("%s %s was stored before", e.Type(), e.ID))
		}
	}
	return why
}

// addID records an id and reports whether it is new. It keeps only a 64-bit hash, because all ids of a large log
// would not fit into memory.
func (s *sessionCheck) addID(id string) bool {
	h := fnv.New64a()
	h.Write([]byte(id)) // never fails
	n := len(s.ids)
	s.ids[h.Sum64()] = struct{}{}
	return len(s.ids) > n
}

// checkEvents checks the events of a session against each other: epochs never decrease, each accepted query has at most
// one end, and nothing follows the session's end on life.
func (v *Verifier) checkEvents(rec Record, s *sessionCheck) string {
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
		why = cmp.Or(why, s.checkRetirement(rec.Position, e), v.checkExecution(rec, s, e))
	}
	return why
}

// checkExecution checks one event of an execution. If the execution is accepted a second time, only that event is a
// problem; after it the execution is expected to end again.
func (v *Verifier) checkExecution(rec Record, s *sessionCheck, e events.Event) string {
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
	case events.IsTerminal(e.Type()) && x == nil:
		v.addSuspectProblem(rec, s, fmt.Sprintf("%s of execution %s, which was never accepted", e.Type(), e.ExecutionID))
	case events.IsTerminal(e.Type()) && x.end != "":
		return fmt.Sprintf("%s of execution %s, which ended with %s at %s", e.Type(), e.ExecutionID, x.end, x.at)
	case events.IsTerminal(e.Type()):
		x.end, x.at = e.Type(), at
	}
	return ""
}

// compare orders positions by shard, and then by sequence.
func (p Position) compare(o Position) int {
	return cmp.Or(cmp.Compare(p.Shard, o.Shard), cmp.Compare(p.Seq, o.Seq))
}

// Report returns the problems, counts and open executions that the Verifier has found so far.
func (v *Verifier) Report() VerifyReport {
	r := VerifyReport{Commits: v.commits, Events: v.events, Stopped: v.isReportFull()}
	v.checkMissing(&r)
	if i := slices.IndexFunc(r.Problems, func(p LogProblem) bool { return !p.Accepted }); i >= 0 {
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
	// The sort is stable because the queries of one commit are already in order.
	slices.SortStableFunc(r.Open, func(a, b OpenExecution) int {
		return a.Position.compare(b.Position)
	})
	return r
}
