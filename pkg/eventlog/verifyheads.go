package eventlog

import (
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/events"
)

// startHeadComparison starts the comparison of a shard with its signed heads. If session is set, only its subjects are
// compared.
func (v *Verifier) startHeadComparison(c *heads.Chain, session events.Subject) {
	var covers func(string) bool
	if session.ID != "" {
		names := []string{events.LifeSubject(session.Tenant, session.ID).String(), events.RunSubject(session.Tenant, session.ID).String()}
		covers = func(subject string) bool { return slices.Contains(names, subject) }
	}
	v.heads = c.Compare(covers)
	v.proved, _ = c.ProvedThrough()
	for _, f := range c.Faults() {
		v.addHeadFault(heads.Fault{Subject: f.Subject, Seq: f.Seq, Why: "signed heads: " + f.Why}, c.Shard())
	}
}

// checkSignedHead compares a commit with its signed head. It returns the problem, or "".
func (v *Verifier) checkSignedHead(rec Record, _ *sessionCheck) string {
	if v.heads == nil {
		return ""
	}
	why, before := v.heads.Add(rec.Subject.String(), rec.Position.Seq, rec.Commit.Hash)
	for _, f := range before {
		v.addHeadFault(f, rec.Position.Shard)
	}
	return why
}

// endHeadComparison ends the comparison of a shard with its signed heads. A missing commit is only suspect, because the
// janitor removes commits of deleted sessions.
func (v *Verifier) endHeadComparison(shard int) {
	if v.heads == nil {
		return
	}
	faults, missing := v.heads.Finish()
	for _, f := range faults {
		v.addHeadFault(f, shard)
	}
	for _, f := range missing {
		subject, err := events.ParseSubject(f.Subject)
		if err != nil {
			v.addHeadFault(f, shard)
			continue
		}
		rec := Record{Subject: subject, Position: Position{Shard: shard, Seq: f.Seq}}
		v.addSuspectProblem(rec, v.sessionOf(rec), f.Why)
	}
	v.heads = nil
}

// addHeadFault adds a fault of a shard's signed heads to the report, if the report has room for it.
func (v *Verifier) addHeadFault(f heads.Fault, shard int) {
	if !v.isReportFull() {
		at := Position{Shard: shard, Seq: f.Seq}
		v.problems = append(v.problems, LogProblem{Position: at, Subject: f.Subject, Why: f.Why, Accepted: slices.Contains(v.accept, at)})
	}
}
