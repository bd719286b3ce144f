package command

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
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

// filter returns the flags as a filter of the client.
func (f filterFlags) filter(state string) client.Filter {
	out := client.Filter{
		State: state, Agent: f.Agent, Architecture: f.Architecture, CreatedAfter: f.CreatedAfter, CreatedBefore: f.CreatedBefore,
		UpdatedAfter: f.UpdatedAfter, UpdatedBefore: f.UpdatedBefore, Text: f.Text, Sort: f.Sort, Order: f.Order,
	}
	key, value, given := strings.Cut(f.Metadata, "=")
	if out.MetadataKey = key; given {
		out.MetadataValue = &value
	}
	return out
}

// given reports whether any of the flags is set.
func (f filterFlags) given() bool { return f != filterFlags{} }

// titleColumns is the maximum width of a title in a list.
const titleColumns = 41

// beginning returns the part of s that fits into a line of a list.
func beginning(s string) string { return terminal.Fit(terminal.Line(s), titleColumns) }

// Run lists sessions.
func (c *sessionsLs) Run(a *app) error {
	if c.Limit < 0 {
		return usage("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Parent != "" {
		if err := checkID("parent", events.KindSession, c.Parent); err != nil {
			return err
		}
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	filter := c.filter(c.Status)
	filter.Parent = c.Parent
	return list(a, c.JSON, c.Limit, cl.Sessions(ctx, filter),
		[]any{"SESSION", "STATUS", "AGENT", "ARCHITECTURE", "SANDBOX", "EXECUTIONS", "UPDATED", "TITLE"},
		func(s client.Session) []any {
			return []any{s.ID, sessionState(s), s.Agent, s.Architecture, s.Sandbox, s.Executions, when(s.UpdatedAt), beginning(s.Title)}
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
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	doc, err := cl.Session(ctx, c.Session)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(doc)
	}
	s := doc.Value
	model := s.Options.Model
	if p := s.Options.ModelProvider; p != "" {
		model = strings.TrimSpace(model + " by " + p)
	}
	err = fields(a, []any{"session", s.ID}, []any{"status", sessionState(s)}, []any{"title", beginning(s.Title)},
		[]any{"agent", s.Agent + " " + s.AgentVersion}, []any{"instance", s.Instance},
		[]any{"architecture", s.Architecture}, []any{"sandbox", s.Sandbox}, []any{"model", model},
		[]any{"created", when(s.CreatedAt)}, []any{"updated", when(s.UpdatedAt)}, []any{"events", s.Tip},
		[]any{"running in", sandboxState(s)}, []any{"sandbox time", sandboxTime(s.SandboxMs, s.SandboxUSD)}, []any{"snapshot", snapshotState(s)},
		[]any{"forked from", parentState(s)}, []any{"forks", s.Forks})
	if err != nil {
		return err
	}
	fmt.Fprintln(a.Out)
	if err := executionsTable(a, false, 0, cl.SessionExecutions(ctx, c.Session)); err != nil || s.Forks == 0 {
		return err
	}
	fmt.Fprintln(a.Out)
	return forksTable(a, s, cl.Sessions(ctx, client.Filter{Parent: s.ID}))
}

// maxForks is the maximum number of forks that are shown with a session.
const maxForks = 20

// forksTable shows the newest forks of a session.
func forksTable(a *app, s client.Session, forks iter.Seq2[client.Doc[client.Session], error]) error {
	if s.Forks > maxForks {
		defer fmt.Fprintf(a.Err, "only the newest %d of %d forks are shown; `spool sessions ls --parent %s --limit 0` shows all\n", maxForks, s.Forks, s.ID)
	}
	table := newTable(a)
	cells(table, []any{"FORK", "AT EVENT", "STATUS", "CREATED", "TITLE"})
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
		cells(table, []any{f.ID, at, sessionState(f), when(f.CreatedAt), beginning(f.Title)})
		if n++; n == maxForks {
			break
		}
	}
	return table.Flush()
}

func parentState(s client.Session) string {
	if s.Parent == nil {
		return ""
	}
	return forkedFrom(*s.Parent)
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

// Run deletes sessions.
func (c *sessionsRm) Run(a *app) error {
	return c.each(a, events.KindSession, "session", c.Sessions, "deleted", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.DeleteSession(ctx, id)
	})
}

type sessionsSync struct {
	server
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run requests snapshots.
func (c *sessionsSync) Run(a *app) error {
	return c.each(a, events.KindSession, "session", c.Sessions, "requested a snapshot of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.Sync(ctx, id)
	})
}

type sessionsTerminate struct {
	server
	Sessions []string `arg:"" name:"session" help:"Ids of the sessions."`
}

// Run terminates sandboxes.
func (c *sessionsTerminate) Run(a *app) error {
	return c.each(a, events.KindSession, "session", c.Sessions, "asked to end the sandbox of", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.TerminateEnvironment(ctx, id)
	})
}

// sandboxState tells of the present sandbox, or the last one.
func sandboxState(s client.Session) string {
	if s.Box == nil {
		return ""
	}
	text := s.Box.ID + ", " + s.Box.State
	if s.Box.Health != "" {
		text += ", " + s.Box.Health
	}
	if s.Box.Reason != "" {
		text += " (" + s.Box.Reason + ")"
	}
	if s.Box.Image != "" {
		text += ", image " + s.Box.Image
	}
	return text
}

func snapshotState(s client.Session) string {
	if s.Snapshot == "" {
		return ""
	}
	return fmt.Sprintf("%s, %d files, %s", whenP(s.SnapshotAt), s.Files, size(int64(s.Bytes)))
}

func sessionState(s client.Session) string {
	switch {
	case s.Active != "" && s.Queued > 0:
		return fmt.Sprintf("%s, running, %d queued", s.Status, s.Queued)
	case s.Active != "":
		return s.Status + ", running"
	case s.Idle:
		return s.Status + ", idle"
	}
	return s.Status
}

// list prints items as a table, or as one object a line; limit 0 means all.
func list[T any](a *app, asJSON bool, limit int, items iter.Seq2[client.Doc[T], error], head []any, row func(T) []any) error {
	table := newTable(a)
	n := 0
	for d, err := range items {
		if err != nil {
			return err
		}
		if limit > 0 && n == limit {
			if !asJSON {
				defer fmt.Fprintf(a.Err, "only the first %d are shown; --limit 0 shows all\n", limit)
			}
			break
		}
		if asJSON {
			if err := a.json(d); err != nil {
				return err
			}
		} else {
			if n == 0 {
				cells(table, head)
			}
			cells(table, row(d.Value))
		}
		n++
	}
	return table.Flush()
}

func newTable(a *app) *tabwriter.Writer { return tabwriter.NewWriter(a.Out, 0, 8, 2, ' ', 0) }

// cells writes a row; what is in it may come from anyone.
func cells(w *tabwriter.Writer, row []any) {
	for i, c := range row {
		if i > 0 {
			fmt.Fprint(w, "\t")
		}
		text := terminal.Line(fmt.Sprint(c))
		if text == "" {
			text = "-"
		}
		fmt.Fprint(w, text)
	}
	fmt.Fprintln(w)
}

// fields prints names and values.
func fields(a *app, rows ...[]any) error {
	table := newTable(a)
	for _, r := range rows {
		cells(table, r)
	}
	return table.Flush()
}

func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05")
}
