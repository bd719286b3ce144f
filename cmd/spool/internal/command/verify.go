package command

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/events"
)

type verifyCommand struct {
	installationFlags
	Session string `arg:"" optional:"" help:"Only this session; by default the whole log."`
	Tenant  string `default:"default" env:"SPOOL_TENANT" help:"Tenant of the session."`

	PublicKey []string `placeholder:"FILE" help:"A file with the public keys, one per line, for the signed heads of the log (heads.pub in the data folder; spool heads public-key). The log is compared with its signed heads. May be repeated."`

	Accept []string `placeholder:"POSITION" help:"Position of a known problem, as printed by an earlier run; may be repeated. The problem is shown but does not fail the command."`
}

// Run verifies the log and prints a report. It returns an error if the log has problems.
func (c *verifyCommand) Run(a *app) (err error) {
	var scope eventlog.VerifyScope
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
		if err := events.CheckTenant("tenant", c.Tenant); err != nil {
			return &exitError{ExitUsage, err}
		}
		scope = eventlog.VerifyScope{Tenant: c.Tenant, Session: c.Session}
	}
	for _, s := range c.Accept {
		at, err := eventlog.ParsePosition(s)
		if err != nil {
			return &exitError{ExitUsage, fmt.Errorf("accept: %w", err)}
		}
		scope.Accept = append(scope.Accept, at)
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	inst, err := c.openInstallation(ctx, a, "")
	if err != nil {
		return contextCause(ctx, err)
	}
	defer func() { err = errors.Join(err, inst.Close()) }()
	if scope.Heads, err = c.readSignedHeads(ctx, inst); err != nil {
		return contextCause(ctx, err)
	}
	report, err := eventlog.Verify(ctx, inst.Log, scope)
	if err != nil {
		return contextCause(ctx, err)
	}
	if c.Session != "" && report.Commits == 0 && len(report.Problems) == 0 {
		return fmt.Errorf("session: the log has no session %s of tenant %s", c.Session, c.Tenant)
	}
	if err := c.printReport(a, report, scope.Heads); err != nil {
		return err
	}
	if report.Problem != nil {
		return problemError(report)
	}
	return nil
}

// problemError returns the error for a log with problems that the user has not accepted.
func problemError(r eventlog.VerifyReport) error {
	n := 0
	for _, p := range r.Problems {
		if !p.Accepted {
			n++
		}
	}
	others := ""
	if n > 1 {
		others = fmt.Sprintf(", and at %d more places", n-1)
	}
	if r.Stopped {
		others += "; the rest was not checked"
	}
	return fmt.Errorf("the log is broken at %w%s", r.Problem, others)
}

// contextCause returns the cause with which ctx has ended, or err if ctx has not ended.
func contextCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// reportJSON is the JSON form of the report on the log.
type reportJSON struct {
	OK       bool            `json:"ok"`
	Sessions int             `json:"sessions"`
	Commits  int             `json:"commits"`
	Events   int             `json:"events"`
	Open     []openQueryJSON `json:"open"`
	Problem  *problemJSON    `json:"problem,omitempty"` // the first problem that is not accepted
	Problems []problemJSON   `json:"problems,omitempty"`
	Stopped  bool            `json:"stopped,omitempty"` // too many problems: the rest was not checked
	Proved   []signedShard   `json:"proved,omitempty"`  // with public keys: how far the signed heads of each shard reach
	// Uncounted are the positions of deletions whose counts of commits cannot be true; earlier builds wrote such counts.
	Uncounted []string `json:"uncounted,omitempty"`
	Undecided uint64   `json:"undecided,omitempty"` // missing commits that may be those of these deletions, and that no signed heads cover
}

// openQueryJSON is the JSON form of a query that has not ended.
type openQueryJSON struct {
	Tenant      string `json:"tenant"`
	SessionID   string `json:"sessionId"`
	ExecutionID string `json:"executionId"`
	Position    string `json:"position"`
	Deleted     bool   `json:"deleted"`
}

// problemJSON is the JSON form of a problem of the log.
type problemJSON struct {
	Position string `json:"position"`
	Subject  string `json:"subject"`
	CommitID string `json:"commitId"`
	Why      string `json:"why"`
	Accepted bool   `json:"accepted,omitempty"`
}

func newProblemJSON(p eventlog.LogProblem) problemJSON {
	return problemJSON{p.Position.String(), p.Subject, p.CommitID, p.Why, p.Accepted}
}

// printReport prints the report on the log, and how far its signed heads reach.
func (c *verifyCommand) printReport(a *app, r eventlog.VerifyReport, chains []*heads.Chain) error {
	if c.JSON {
		v := reportJSON{Proved: describeSignedShards(chains), OK: r.Problem == nil, Sessions: r.Sessions, Commits: r.Commits, Events: r.Events, Open: []openQueryJSON{}, Stopped: r.Stopped, Undecided: r.Undecided}
		for _, at := range r.Uncounted {
			v.Uncounted = append(v.Uncounted, at.String())
		}
		for _, o := range r.Open {
			v.Open = append(v.Open, openQueryJSON{o.Tenant, o.Session, o.ExecutionID, o.Position.String(), o.Deleted})
		}
		if p := r.Problem; p != nil {
			place := newProblemJSON(*p)
			v.Problem = &place
		}
		for _, p := range r.Problems {
			v.Problems = append(v.Problems, newProblemJSON(p))
		}
		return a.printJSON(v)
	}
	for _, o := range r.Open {
		if _, err := terminal.Fprintf(a.Out, "open: %s of %s, accepted at %s, has no end yet\n", o.ExecutionID, o.Session, o.Position); err != nil {
			return err
		}
	}
	for _, p := range r.Problems {
		what := "fault"
		if p.Accepted {
			what = "accepted fault"
		}
		if _, err := terminal.Fprintf(a.Out, "%s: %v\n", what, &p); err != nil {
			return err
		}
	}
	if err := printSignedShards(a.Out, chains); err != nil {
		return err
	}
	if err := printUncounted(a.Out, r); err != nil {
		return err
	}
	if r.Problem != nil {
		return nil // the returned error has the problem
	}
	sound := "sound"
	switch {
	case r.Undecided > 0:
		sound = fmt.Sprintf("sound except for %d missing commits, which are undecided", r.Undecided)
	case len(r.Problems) > 0:
		sound = "sound except for accepted problems"
	}
	_, err := terminal.Fprintf(a.Out, "%s: %d sessions, %d commits, %d events, %d queries without an end\n", sound, r.Sessions, r.Commits, r.Events, len(r.Open))
	return err
}

// printUncounted prints how many deletions have impossible counts, and what follows for missing commits.
func printUncounted(w io.Writer, r eventlog.VerifyReport) error {
	if len(r.Uncounted) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown: %d deleted sessions have a count of commits that cannot be true, which an earlier build wrote; the first is at %s\n", len(r.Uncounted), r.Uncounted[0])
	if r.Undecided > 0 {
		text += fmt.Sprintf("undecided: %d commits are missing that these sessions may have had; compare the log with its signed heads (--public-key)\n", r.Undecided)
	}
	_, err := io.WriteString(w, text)
	return err
}
