package command

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

type diffCommand struct {
	of
	From string `arg:"" name:"from" help:"Seq of the first event, or another session's id."`
	To   string `arg:"" name:"to" optional:"" help:"Seq of the second event."`

	ExitCode bool `name:"exit-code" help:"Exit with code 1 if there is a difference, as git diff does."`
}

// exit returns the error with the command's exit code.
func (c *diffCommand) exit(equal bool) error {
	if c.ExitCode && !equal {
		return &exitError{code: ExitFailed}
	}
	return nil
}

// Run compares two events of a session, or two sessions.
func (c *diffCommand) Run(a *app) error {
	if c.To == "" {
		if err := checkID("from", events.KindSession, c.From); err != nil {
			return usage("to: name the seqs of two events, or the id of another session: %q is neither", truncate.Text(c.From, 64))
		}
		return c.with(a, "", "", func(ctx context.Context, cl *client.Client) error { return c.sessions(ctx, a, cl) })
	}
	from, err := seq("from", c.From)
	if err != nil {
		return err
	}
	to, err := seq("to", c.To)
	if err != nil {
		return err
	}
	return c.with(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := cl.Diff(ctx, c.Session, from, to)
		if err != nil {
			return err
		}
		if c.JSON {
			err = a.json(doc)
		} else {
			err = showDiff(a, doc.Value)
		}
		if err != nil {
			return err
		}
		return c.exit(doc.Value.Equal())
	})
}

// seq parses the seq of an event.
func seq(field, text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, usage("%s: %q is not the seq of an event: it must be a number from 1 to 4294967295", field, truncate.Text(text, 64))
	}
	return uint32(n), nil
}

// sessions compares two sessions.
func (c *diffCommand) sessions(ctx context.Context, a *app, cl *client.Client) error {
	doc, err := cl.Compare(ctx, c.Session, c.From)
	if err != nil {
		return err
	}
	if c.JSON {
		if err := a.json(doc); err != nil {
			return err
		}
		return c.exit(doc.Value.Equal)
	}
	d := doc.Value
	fmt.Fprintln(a.Out, terminal.Line(d.Summary))
	if !d.Equal {
		fmt.Fprintf(a.Out, "The %d events before are equal, except for ids, times and costs.\n", d.Events)
	}
	for _, side := range []struct {
		mark string
		e    *events.Wire
	}{{"-", d.Event}, {"+", d.WithEvent}} {
		if side.e != nil {
			fmt.Fprintf(a.Out, "%s%6d  %s  %s\n", side.mark, side.e.Seq, terminal.Line(string(side.e.Type)), summary(*side.e))
		}
	}
	return c.exit(d.Equal)
}

func showDiff(a *app, d client.Diff) error {
	fmt.Fprintf(a.Out, "event %d to event %d\n", d.From, d.To)
	for _, s := range d.Statuses {
		was := s.From
		if was == "" {
			was = "none"
		}
		fmt.Fprintf(a.Out, "%s %s: %s -> %s\n", s.Kind, terminal.Line(s.ID), terminal.Line(was), terminal.Line(s.To))
	}
	fmt.Fprintf(a.Out, "reported: %s\nmetered: %s\n\n%d blocks\n", usageTotal(d.Reported), usageTotal(d.Metered), d.BlockCount)
	for _, b := range d.Blocks {
		mark := "~ "
		if b.Change == "added" {
			mark = "+ "
		}
		if err := blockLine(a, mark, b.Block); err != nil {
			return err
		}
	}
	if n := int(d.BlockCount) - len(d.Blocks); n > 0 {
		fmt.Fprintf(a.Out, "and %d more\n", n)
	}
	fmt.Fprintf(a.Out, "\n%s\n", terminal.Line(d.Files.Summary))
	for _, f := range d.Files.Files {
		showFile(a, f)
	}
	if n := int(d.Files.Count) - len(d.Files.Files); n > 0 {
		fmt.Fprintf(a.Out, "and %d more files\n", n)
	}
	if d.Files.Cut {
		fmt.Fprintln(a.Out, "Some files are shown without text: there are too many, or they are too long. Compare a smaller range to see them.")
	}
	return nil
}

func showFile(a *app, f client.FileDiff) {
	if f.Text != "" {
		for _, line := range strings.Split(strings.TrimSuffix(f.Text, "\n"), "\n") {
			fmt.Fprintln(a.Out, terminal.Safe(line))
		}
		return
	}
	fmt.Fprintf(a.Out, "%s %s (%s): %s -> %s\n", f.Change, terminal.Line(f.Path), terminal.Line(f.Omitted), fileVersion(f.From), fileVersion(f.To))
}

func fileVersion(v *client.FileVersion) string {
	if v == nil {
		return "none"
	}
	text := fmt.Sprintf("%s, mode %o", size(int64(v.Size)), v.Mode)
	if v.Kind == "symlink" {
		text = "a link to " + terminal.Line(v.Target)
	}
	if v.SHA256 != "" {
		text += ", SHA-256 " + terminal.Line(v.SHA256)
	}
	return text
}
