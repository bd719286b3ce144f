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
	Ls   sessionsLs   `cmd:"" help:"List sessions, newest first."`
	Show sessionsShow `cmd:"" help:"Show a session and its executions."`
	Rm   sessionsRm   `cmd:"" help:"Delete sessions permanently; running executions are cancelled."`

	Sync      sessionsSync      `cmd:"" help:"Request a snapshot of the workspace now."`
	Terminate sessionsTerminate `cmd:"" help:"Terminate sandboxes at once, with everything that runs in them; the sessions continue from their last snapshots."`
}

type sessionsLs struct {
	server
	Status string `enum:",open,closed" default:"" help:"Only sessions with this status: open or closed."`
	Parent string `placeholder:"SESSION" help:"Only forks of this session."`
	filterFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

// filterFlags filter and sort a list of sessions or executions. The server validates them.
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

// metadata returns the key and the value of --metadata. The value is nil if the flag has none.
func (f filterFlags) metadata() (key string, value *string) {
	key, v, given := strings.Cut(f.Metadata, "=")
	if given {
		value = &v
	}
	return key, value
}

// sessions returns a request for a list of sessions.
func (f filterFlags) sessions(status, parent string) *spoolv1.ListSessionsRequest {
	key, value := f.metadata()
	return &spoolv1.ListSessionsRequest{
		Status: status, Parent: parent, Agent: f.Agent, Architecture: f.Architecture, MetadataKey: key, MetadataValue: value, CreatedAfter: f.CreatedAfter,
		CreatedBefore: f.CreatedBefore, UpdatedAfter: f.UpdatedAfter, UpdatedBefore: f.UpdatedBefore, Text: f.Text, Sort: f.Sort, Order: f.Order,
	}
}

// executions returns a request for a list of executions.
func (f filterFlags) executions(phase string) *spoolv1.ListExecutionsRequest {
	key, value := f.metadata()
	return &spoolv1.ListExecutionsRequest{
		Phase: phase, Agent: f.Agent, Architecture: f.Architecture, MetadataKey: key, MetadataValue: value, CreatedAfter: f.CreatedAfter,
		CreatedBefore: f.CreatedBefore, UpdatedAfter: f.UpdatedAfter, UpdatedBefore: f.UpdatedBefore, Text: f.Text, Sort: f.Sort, Order: f.Order,
	}
}

// given reports whether any of the flags is set.
func (f filterFlags) given() bool { return f != filterFlags{} }

// titleColumns is the maximum width of a title in a list.
const titleColumns = 41

// excerpt returns the part of s that fits into a line of a list.
func excerpt(s string) string { return terminal.Fit(terminal.Line(s), titleColumns) }

// Run lists sessions.
func (c *sessionsLs) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Parent != "" {
		if err := checkID("parent", events.KindSession, c.Parent); err != nil {
			return err
		}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		sessions := client.List[*spoolv1.Session](ctx, cl.Sessions.ListSessions, c.sessions(c.Status, c.Parent))
		return list(a, c.JSON, c.Limit, sessions,
			[]any{"SESSION", "STATUS", "AGENT", "ARCHITECTURE", "SANDBOX", "EXECUTIONS", "UPDATED", "TITLE"},
			func(s *spoolv1.Session) []any {
				return []any{s.SessionId, sessionState(s), s.Agent, s.Architecture, s.Sandbox, s.Executions, formatTime(s.UpdatedAt), excerpt(s.Title)}
			})
	})
}

type sessionsShow struct {
	server
	Session string `arg:"" help:"The session's id."`
}

// Run shows one session.
func (c *sessionsShow) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error { return c.show(ctx, a, cl) })
}

func (c *sessionsShow) show(ctx context.Context, a *app, cl *client.Client) error {
	doc, err := client.Call(ctx, cl.Sessions.GetSession, &spoolv1.GetSessionRequest{SessionId: c.Session})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.printJSON(doc)
	}
	s := doc.Value
	model := s.GetSessionOptions().GetModel()
	if p := s.GetSessionOptions().GetModelProvider(); p != "" {
		model = strings.TrimSpace(model + " by " + p)
	}
	err = printFields(a, []any{"session", s.SessionId}, []any{"status", sessionState(s)}, []any{"title", excerpt(s.Title)},
		[]any{"agent", s.Agent + " " + s.AgentVersion}, []any{"instance", s.GetInstance()},
		[]any{"architecture", s.Architecture}, []any{"sandbox", s.Sandbox}, []any{"model", model},
		[]any{"created", formatTime(s.CreatedAt)}, []any{"updated", formatTime(s.UpdatedAt)}, []any{"events", s.Tip},
		[]any{"running in", sandboxState(s)}, []any{"sandbox time", sandboxTime(s.SandboxMs, s.SandboxCostUsd)}, []any{"snapshot", snapshotState(s)},
		[]any{"forked from", parentState(s)}, []any{"forks", s.Forks})
	if err != nil {
		return err
	}
	fmt.Fprintln(a.Out)
	if err := executionsTable(a, false, 0, sessionExecutions(ctx, cl, c.Session)); err != nil || s.Forks == 0 {
		return err
	}
	fmt.Fprintln(a.Out)
	return forksTable(a, s, client.List[*spoolv1.Session](ctx, cl.Sessions.ListSessions, &spoolv1.ListSessionsRequest{Parent: s.SessionId}))
}

// maxForks is the maximum number of forks that are shown with a session.
const maxForks = 20

// forksTable shows the newest forks of a session.
func forksTable(a *app, s *spoolv1.Session, forks iter.Seq2[client.Doc[*spoolv1.Session], error]) error {
	if s.Forks > maxForks {
		defer fmt.Fprintf(a.Err, "only the newest %d of %d forks are shown; `spool sessions ls --parent %s --limit 0` shows all\n", maxForks, s.Forks, s.SessionId)
	}
	table := newTable(a)
	writeRow(table, []any{"FORK", "AT EVENT", "STATUS", "CREATED", "TITLE"})
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
		writeRow(table, []any{f.SessionId, at, sessionState(f), formatTime(f.CreatedAt), excerpt(f.Title)})
		if n++; n == maxForks {
			break
		}
	}
	return table.Flush()
}

func parentState(s *spoolv1.Session) string {
	if s.Parent == nil {
		return ""
	}
	return forkedFrom(s.Parent)
}

// sandboxTime returns the running time of metered sandboxes, or "" if there is none.
func sandboxTime(ms, usd float64) string {
	if ms == 0 {
		return ""
	}
	text := (time.Duration(ms) * time.Millisecond).String()
	if usd > 0 {
		text += fmt.Sprintf(", $%.4f", usd)
	}
	return text
}

type sessionsRm struct {
	server
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run deletes sessions permanently.
func (c *sessionsRm) Run(a *app) error {
	return c.eachID(a, events.KindSession, "session", c.Sessions, "deleted", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.DeleteSession, &spoolv1.DeleteSessionRequest{SessionId: id})
	})
}

type sessionsSync struct {
	server
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run requests snapshots of the workspaces of sessions.
func (c *sessionsSync) Run(a *app) error {
	return c.eachID(a, events.KindSession, "session", c.Sessions, "requested a snapshot of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.SyncSession, &spoolv1.SyncSessionRequest{SessionId: id})
	})
}

type sessionsTerminate struct {
	server
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run requests the end of the sandboxes of sessions.
func (c *sessionsTerminate) Run(a *app) error {
	return c.eachID(a, events.KindSession, "session", c.Sessions, "asked to end the sandbox of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Sessions.TerminateEnvironment, &spoolv1.TerminateEnvironmentRequest{SessionId: id})
	})
}

// sandboxState describes the present sandbox, or the last one; "" if there was none.
func sandboxState(s *spoolv1.Session) string {
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

// snapshotState describes the last snapshot; "" if there is none.
func snapshotState(s *spoolv1.Session) string {
	if s.GetSnapshot() == "" {
		return ""
	}
	return fmt.Sprintf("%s, %d files, %s", formatTime(s.SnapshotAt), s.WorkspaceFiles, size(int64(s.WorkspaceBytes)))
}

// sessionState describes the status of a session and of its executions.
func sessionState(s *spoolv1.Session) string {
	switch {
	case s.GetActiveExecutionId() != "" && s.Queued > 0:
		return fmt.Sprintf("%s, running, %d queued", s.Status, s.Queued)
	case s.GetActiveExecutionId() != "":
		return s.Status + ", running"
	case s.Idle:
		return s.Status + ", idle"
	}
	return s.Status
}
