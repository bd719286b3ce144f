package command

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type sessionsCommand struct {
	Ls    sessionsLsCommand    `cmd:"" help:"List sessions, newest first."`
	Watch sessionsWatchCommand `cmd:"" help:"Show changes of sessions as they happen."`
	Show  sessionsShowCommand  `cmd:"" help:"Show a session and its executions."`
	Rm    sessionsRmCommand    `cmd:"" help:"Delete sessions permanently; running executions are cancelled."`

	Sync      sessionsSyncCommand      `cmd:"" help:"Request a snapshot of the workspace now."`
	Terminate sessionsTerminateCommand `cmd:"" help:"Terminate sandboxes at once, with everything that runs in them; the sessions continue from their last snapshots."`
}

type sessionsLsCommand struct {
	serverFlags
	Status string `enum:",open,closed" default:"" help:"Only sessions with this status: open or closed."`
	Parent string `placeholder:"SESSION" help:"Only forks of this session."`

	Phase         []string `enum:"queued,running,waiting_for_approval,failed,idle" placeholder:"PHASE" help:"Only sessions in this phase: queued, running, waiting_for_approval, failed or idle. Repeat the flag for more phases."`
	OpenApprovals bool     `help:"Only sessions with open approval requests."`
	filterFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

// filterFlags are flags that filter and sort a list of sessions or executions. The server validates their values.
type filterFlags struct {
	Agent         string `placeholder:"REF" help:"Only with this agent, in any version or in the version of the given digest."`
	Architecture  string `placeholder:"NAME" help:"Only with this architecture."`
	Metadata      string `placeholder:"KEY[=VALUE]" help:"Only with this member in the metadata."`
	CreatedAfter  string `placeholder:"TIME" help:"Only created at this time (RFC 3339) or later."`
	CreatedBefore string `placeholder:"TIME" help:"Only created before this time."`
	UpdatedAfter  string `placeholder:"TIME" help:"Only changed at this time or later."`
	UpdatedBefore string `placeholder:"TIME" help:"Only changed before this time."`
	Text          string `help:"Only with this text in the title, query, result or metadata."`
	Sort          string `enum:",created,updated" default:"" help:"Sort by created (the default) or updated."`
	Order         string `enum:",asc,desc" default:"" help:"desc (newest first, the default) or asc."`
}

// splitMetadata returns the key and the value in the flag --metadata. The value is nil if the flag has only a key.
func (f filterFlags) splitMetadata() (key string, value *string) {
	key, v, given := strings.Cut(f.Metadata, "=")
	if given {
		value = &v
	}
	return key, value
}

// sessionsRequest returns the request for a list of sessions that the flags describe.
func (f filterFlags) sessionsRequest(status, parent string) *spoolv1.ListSessionsRequest {
	key, value := f.splitMetadata()
	return &spoolv1.ListSessionsRequest{
		Status: status, Parent: parent, Agent: f.Agent, Architecture: f.Architecture, MetadataKey: key, MetadataValue: value, CreatedAfter: f.CreatedAfter,
		CreatedBefore: f.CreatedBefore, UpdatedAfter: f.UpdatedAfter, UpdatedBefore: f.UpdatedBefore, Text: f.Text, Sort: f.Sort, Order: f.Order,
	}
}

// executionsRequest returns the request for a list of executions that the flags describe.
func (f filterFlags) executionsRequest(phase string) *spoolv1.ListExecutionsRequest {
	key, value := f.splitMetadata()
	return &spoolv1.ListExecutionsRequest{
		Phase: phase, Agent: f.Agent, Architecture: f.Architecture, MetadataKey: key, MetadataValue: value, CreatedAfter: f.CreatedAfter,
		CreatedBefore: f.CreatedBefore, UpdatedAfter: f.UpdatedAfter, UpdatedBefore: f.UpdatedBefore, Text: f.Text, Sort: f.Sort, Order: f.Order,
	}
}

// isSet reports whether any of the flags is set.
func (f filterFlags) isSet() bool { return f != filterFlags{} }

// maxTitleColumns is the maximum width of a title in a list.
const maxTitleColumns = 41

// titleExcerpt returns the part of a title that fits into a list.
func titleExcerpt(s string) string { return terminal.FitLine(terminal.SafeLine(s), maxTitleColumns) }

// Run lists sessions.
func (c *sessionsLsCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Parent != "" {
		if err := checkID("parent", events.KindSession, c.Parent); err != nil {
			return err
		}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		r := c.sessionsRequest(c.Status, c.Parent)
		if r.Phase = c.Phase; c.OpenApprovals {
			r.HasOpenApprovals = &c.OpenApprovals
		}
		sessions := client.List[*spoolv1.Session](ctx, cl.Sessions.ListSessions, r)
		return printList(a, c.JSON, c.Limit, sessions,
			[]any{"SESSION", "STATUS", "AGENT", "ARCHITECTURE", "SANDBOX", "EXECUTIONS", "COST", "UPDATED", "TITLE"},
			func(s *spoolv1.Session) []any {
				return []any{s.SessionId, describeSession(s), s.Agent, s.Architecture, s.Sandbox, s.Executions, formatCost(s.CostUsd), formatTime(s.UpdatedAt), titleExcerpt(s.Title)}
			})
	})
}

type sessionsWatchCommand struct {
	serverFlags
	After string `placeholder:"CURSOR" help:"Begin after this cursor, which --json prints with each change, instead of now."`
}

// Run shows changes until the user interrupts it. A session that changed several times while the connection was lost is shown once.
func (c *sessionsWatchCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		for m, err := range cl.FollowSessions(ctx, c.After) {
			switch {
			case err != nil && ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			case c.JSON:
				if err := a.printJSON(m); err != nil {
					return err
				}
			case m.Session != nil:
				s := m.Session.Value
				terminal.Fprintf(a.Out, "%s  %s  %s  %s  %s\n", formatTime(s.UpdatedAt), s.SessionId, describeSession(s), s.Agent, titleExcerpt(s.Title))
			case m.Deleted != nil:
				terminal.Fprintf(a.Out, "%s  %s  deleted\n", formatTime(m.Deleted.Value.DeletedAt), m.Deleted.Value.SessionId)
			}
		}
		return nil
	})
}

type sessionsShowCommand struct {
	serverFlags
	Session string `arg:"" help:"The session's id."`
}

// Run shows one session.
func (c *sessionsShowCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error { return c.printSession(ctx, a, cl) })
}

func (c *sessionsShowCommand) printSession(ctx context.Context, a *app, cl *client.Client) error {
	doc, err := client.Call(ctx, cl.Sessions.GetSession, &spoolv1.GetSessionRequest{SessionId: c.Session})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.printJSON(doc)
	}
	s := doc.Value
	waiting, err := activeWaiting(ctx, cl, s)
	if err != nil {
		return err
	}
	model := s.GetSessionOptions().GetModel()
	if p := s.GetSessionOptions().GetModelProvider(); p != "" {
		model = strings.TrimSpace(model + " by " + p)
	}
	err = printFields(a, []any{"session", s.SessionId}, []any{"status", describeSession(s)}, []any{"since", formatTime(s.PhaseSince)}, []any{"waits for", describeWaiting(waiting)}, []any{"last error", describeLastError(s)}, []any{"title", titleExcerpt(s.Title)},
		[]any{"agent", s.Agent + " " + s.AgentVersion}, []any{"instance", s.GetInstance()},
		[]any{"architecture", s.Architecture}, []any{"sandbox", s.Sandbox}, []any{"model", model},
		[]any{"created", formatTime(s.CreatedAt)}, []any{"updated", formatTime(s.UpdatedAt)}, []any{"events", s.Tip},
		[]any{"tokens", formatTokens(s.Usage)}, []any{"cost", formatCost(s.CostUsd)},
		[]any{"running in", describeSandbox(s)}, []any{"sandbox time", formatSandboxTime(s.SandboxMs, s.SandboxCostUsd)}, []any{"snapshot", describeSnapshot(s)},
		[]any{"forked from", describeParent(s)}, []any{"forks", s.Forks})
	if err != nil {
		return err
	}
	terminal.Fprintln(a.Out)
	if err := printExecutions(a, false, 0, sessionExecutions(ctx, cl, c.Session)); err != nil || s.Forks == 0 {
		return err
	}
	terminal.Fprintln(a.Out)
	return printForks(a, s, client.List[*spoolv1.Session](ctx, cl.Sessions.ListSessions, &spoolv1.ListSessionsRequest{Parent: s.SessionId}))
}

// activeWaiting returns why the active execution of a session waits, or nil if the session has none, or it does not wait.
func activeWaiting(ctx context.Context, cl *client.Client, s *spoolv1.Session) (*spoolv1.Waiting, error) {
	if s.GetActiveExecutionId() == "" {
		return nil, nil
	}
	doc, err := client.Call(ctx, cl.Executions.GetExecution, &spoolv1.GetExecutionRequest{ExecutionId: s.GetActiveExecutionId()})
	return doc.Value.GetWaiting(), err
}

// maxShownForks is the maximum number of forks that "spool sessions show" prints.
const maxShownForks = 20

// printForks prints a table of the newest forks of a session.
func printForks(a *app, s *spoolv1.Session, forks iter.Seq2[client.APIObject[*spoolv1.Session], error]) error {
	if s.Forks > maxShownForks {
		defer terminal.Fprintf(a.Err, "only the newest %d of %d forks are shown; `spool sessions ls --parent %s --limit 0` shows all\n", maxShownForks, s.Forks, s.SessionId)
	}
	table := newTable(a)
	writeTableRow(table, []any{"FORK", "AT EVENT", "STATUS", "CREATED", "TITLE"})
	n := 0
	for d, err := range forks {
		if err != nil {
			return err
		}
		f := d.Value
		at := ""
		if f.Parent != nil {
			at = fmt.Sprint(f.Parent.Effective)
		}
		writeTableRow(table, []any{f.SessionId, at, describeSession(f), formatTime(f.CreatedAt), titleExcerpt(f.Title)})
		if n++; n == maxShownForks {
			break
		}
	}
	return table.Flush()
}

// describeParent returns a text that states from which session and event a fork continues, or "" if the session is no
// fork.
func describeParent(s *spoolv1.Session) string {
	if s.Parent == nil {
		return ""
	}
	return describeForkOrigin(s.Parent)
}

// formatSandboxTime returns the time for which metered sandboxes have run, with its cost, or "" if there is none.
func formatSandboxTime(ms, usd float64) string {
	if ms == 0 {
		return ""
	}
	text := (time.Duration(ms) * time.Millisecond).String()
	if usd > 0 {
		text += fmt.Sprintf(", $%.4f", usd)
	}
	return text
}

type sessionsRmCommand struct {
	serverFlags
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run deletes sessions permanently.
func (c *sessionsRmCommand) Run(a *app) error {
	return c.forEachID(a, events.KindSession, "session", c.Sessions, "deleted", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.DeleteSession, &spoolv1.DeleteSessionRequest{SessionId: id})
	})
}

type sessionsSyncCommand struct {
	serverFlags
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run requests snapshots of the workspaces of sessions.
func (c *sessionsSyncCommand) Run(a *app) error {
	return c.forEachID(a, events.KindSession, "session", c.Sessions, "requested a snapshot of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.SyncSession, &spoolv1.SyncSessionRequest{SessionId: id})
	})
}

type sessionsTerminateCommand struct {
	serverFlags
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run requests the end of the sandboxes of sessions.
func (c *sessionsTerminateCommand) Run(a *app) error {
	return c.forEachID(a, events.KindSession, "session", c.Sessions, "asked to end the sandbox of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.TerminateEnvironment, &spoolv1.TerminateEnvironmentRequest{SessionId: id})
	})
}

// describeSandbox returns a text about the session's current sandbox, or about the last one. It returns "" if there was
// none.
func describeSandbox(s *spoolv1.Session) string {
	sandbox := s.GetCurrentSandbox()
	if sandbox == nil {
		return ""
	}
	text := sandbox.SandboxId + ", " + sandbox.State
	if sandbox.GetHealth() != "" {
		text += ", " + sandbox.GetHealth()
	}
	if sandbox.GetReason() != "" {
		text += " (" + sandbox.GetReason() + ")"
	}
	if sandbox.GetImage() != "" {
		text += ", image " + sandbox.GetImage()
	}
	return text
}

// describeSnapshot returns a text about the last snapshot of the session, or "" if there is none.
func describeSnapshot(s *spoolv1.Session) string {
	if s.GetSnapshot() == "" {
		return ""
	}
	return fmt.Sprintf("%s, %d files, %s", formatTime(s.SnapshotAt), s.WorkspaceFiles, formatSize(int64(s.WorkspaceBytes)))
}

// describeSession returns a text about the status of a session, its phase, open approval requests and queued
// executions.
func describeSession(s *spoolv1.Session) string {
	parts := []string{s.Status}
	switch {
	case s.Phase == "idle" && s.Idle:
		parts = append(parts, "idle")
	case s.Phase != "idle" && s.Phase != "":
		parts = append(parts, s.Phase)
	}
	if s.OpenApprovals > 0 {
		parts = append(parts, fmt.Sprintf("%d open approvals", s.OpenApprovals))
	}
	if s.Queued > 0 {
		parts = append(parts, fmt.Sprintf("%d queued", s.Queued))
	}
	return strings.Join(parts, ", ")
}

// describeLastError returns a text about the failure of the execution that ended last, or "" if it did not fail.
func describeLastError(s *spoolv1.Session) string {
	e := s.GetLastError()
	if e == nil {
		return ""
	}
	return fmt.Sprintf("%s: %s (%s, %s)", e.Code, terminal.SafeLine(e.Message), e.ExecutionId, formatTime(e.Time))
}
