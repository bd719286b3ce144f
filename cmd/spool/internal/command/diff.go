package command

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

type diffCommand struct {
	sessionFlags
	From string `arg:"" name:"from" help:"Seq of the first event, or another session's id."`
	To   string `arg:"" name:"to" optional:"" help:"Seq of the second event."`

	ExitCode bool `name:"exit-code" help:"Exit with code 1 if there is a difference, as git diff does."`
}

// differenceError returns the error that sets the exit code of "spool diff": nil, unless there is a difference and the
// flag --exit-code is set.
func (c *diffCommand) differenceError(equal bool) error {
	if c.ExitCode && !equal {
		return &exitError{code: ExitFailed}
	}
	return nil
}

// Run compares the states of a session after two events, or two sessions, and prints the differences.
func (c *diffCommand) Run(a *app) error {
	if c.To == "" {
		if err := checkID("from", events.KindSession, c.From); err != nil {
			return usageError("to: name the seqs of two events, or the id of another session: %q is neither", truncate.Text(c.From, 64))
		}
		return c.withClientAndPath(a, "", "", func(ctx context.Context, cl *client.Client) error { return c.compareSessions(ctx, a, cl) })
	}
	from, err := parseSeq("from", c.From)
	if err != nil {
		return err
	}
	to, err := parseSeq("to", c.To)
	if err != nil {
		return err
	}
	return c.withClientAndPath(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Sessions.DiffSession, &spoolv1.DiffSessionRequest{SessionId: c.Session, From: from, To: to})
		if err != nil {
			return err
		}
		if c.JSON {
			err = a.printJSON(doc)
		} else {
			err = printDiff(a, doc.Value)
		}
		if err != nil {
			return err
		}
		return c.differenceError(isEmptyDiff(doc.Value))
	})
}

// isEmptyDiff reports whether a diff contains no difference. Files that could not be compared count as a difference.
func isEmptyDiff(d *spoolv1.SessionDiff) bool {
	usage := proto.Size(d.Reported) + proto.Size(d.Metered)
	return len(d.Statuses) == 0 && d.BlockCount == 0 && usage == 0 && d.Files.GetFileCount() == 0 && !d.Files.GetSnapshotGone()
}

// parseSeq parses the seq of an event. field is the argument, for the error message.
func parseSeq(field, text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, usageError("%s: %q is not the seq of an event: it must be a number from 1 to 4294967295", field, truncate.Text(text, 64))
	}
	return uint32(n), nil
}

// compareSessions compares two sessions and prints the differences.
func (c *diffCommand) compareSessions(ctx context.Context, a *app, cl *client.Client) error {
	doc, err := client.Call(ctx, cl.Sessions.CompareSessions, &spoolv1.CompareSessionsRequest{SessionId: c.Session, With: c.From})
	if err != nil {
		return err
	}
	if c.JSON {
		if err := a.printJSON(doc); err != nil {
			return err
		}
		return c.differenceError(doc.Value.Equal)
	}
	d := doc.Value
	terminal.Fprintln(a.Out, d.Summary)
	if !d.Equal {
		terminal.Fprintf(a.Out, "The %d events before are equal, except for ids, times and costs.\n", d.EqualEvents)
	}
	for _, side := range []struct {
		mark string
		e    *spoolv1.Event
	}{{"-", d.Event}, {"+", d.WithEvent}} {
		if side.e == nil {
			continue
		}
		e, err := client.ConvertStored[events.WireEvent](side.e)
		if err != nil {
			return err
		}
		terminal.Fprintf(a.Out, "%s%6d  %s  %s\n", side.mark, e.Seq, string(e.Type), summarizeEvent(e))
	}
	return c.differenceError(d.Equal)
}

// printDiff prints the differences in files, conversations and states.
func printDiff(a *app, d *spoolv1.SessionDiff) error {
	terminal.Fprintf(a.Out, "event %d to event %d\n", d.From, d.To)
	for _, s := range d.Statuses {
		was := s.From
		if was == "" {
			was = "none"
		}
		terminal.Fprintf(a.Out, "%s %s: %s -> %s\n", s.Kind, s.Id, was, s.To)
	}
	terminal.Fprintf(a.Out, "reported: %s\nmetered: %s\n\n%d blocks\n", formatUsageTotal(d.Reported), formatUsageTotal(d.Metered), d.BlockCount)
	for _, b := range d.Blocks {
		mark := "~ "
		if b.Change == "added" {
			mark = "+ "
		}
		if err := printBlockSummary(a, mark, b.Block); err != nil {
			return err
		}
	}
	if n := int(d.BlockCount) - len(d.Blocks); n > 0 {
		terminal.Fprintf(a.Out, "and %d more\n", n)
	}
	terminal.Fprintf(a.Out, "\n%s\n", d.Files.GetSummary())
	for _, f := range d.Files.GetFiles() {
		printFileDiff(a, f)
	}
	if n := int(d.Files.GetFileCount()) - len(d.Files.GetFiles()); n > 0 {
		terminal.Fprintf(a.Out, "and %d more files\n", n)
	}
	if d.Files.GetCut() {
		terminal.Fprintln(a.Out, "Some files are shown without text: there are too many, or they are too long. Compare a smaller range to see them.")
	}
	return nil
}

// printFileDiff prints the difference of one file.
func printFileDiff(a *app, f *spoolv1.FileDiff) {
	if f.GetText() != "" {
		terminal.Fprintln(a.Out, terminal.Lines(strings.TrimSuffix(f.GetText(), "\n")))
		return
	}
	terminal.Fprintf(a.Out, "%s %s (%s): %s -> %s\n", f.Change, f.Path, f.GetOmitted(), describeFileVersion(f.From), describeFileVersion(f.To))
}

// describeFileVersion returns a short text for a version of a file.
func describeFileVersion(v *spoolv1.FileVersion) string {
	if v == nil {
		return "none"
	}
	text := fmt.Sprintf("%s, mode %o", formatSize(int64(v.Size)), v.Mode)
	if v.Kind == "symlink" {
		text = "a link to " + terminal.SafeLine(v.GetTarget())
	}
	if v.GetSha256() != "" {
		text += ", SHA-256 " + terminal.SafeLine(v.GetSha256())
	}
	return text
}
