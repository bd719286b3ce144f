package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

type filesPull struct {
	of
	Dir    string `arg:"" optional:"" help:"The folder that the changes go into; without it the one that was uploaded by spool run --workspace."`
	DryRun bool   `help:"Show the changes alone."`
	Yes    bool   `short:"y" help:"Take the changes without a question, but for conflicts."`
	Force  bool   `help:"With --yes, or once you have agreed: take the session's side of conflicts, too, over what was changed here."`
}

// Run brings changes of a session's workspace back into a folder of this machine.
func (c *filesPull) Run(a *app) error {
	return c.with(a, "dir", "", func(ctx context.Context, cl *client.Client) error {
		s, err := cl.Session(ctx, c.Session)
		if err != nil {
			return err
		}
		if p := s.Value.Options.HostPath; p != "" {
			return usage("session: it works in %s itself: there is nothing to bring back", p)
		}
		p := &pullRun{app: a, cmd: c, client: cl}
		return p.run(ctx, s.Value)
	})
}

// pullRun is one run of spool files pull. It compares three sides of each path: what
// was uploaded, what the session has, and what lies in the local folder.
type pullRun struct {
	app    *app
	cmd    *filesPull
	client *client.Client

	recordFile string   // file that holds record
	record     uploaded // what the session's workspace and the recorded folder had in common last
	folder     string   // the local folder, absolute
	root       *os.Root // of folder
	staging    string   // folder of the session's content, removed at the end
	remote     map[string]*remoteEntry
	changes    []*change
}

func (p *pullRun) run(ctx context.Context, s client.Session) (err error) {
	if err := p.readRecord(); err != nil {
		return err
	}
	if p.root, err = os.OpenRoot(p.folder); err != nil {
		return usage("dir: %v", err)
	}
	defer p.root.Close() //nolint:errcheck // each file was closed with its error
	if p.staging, err = os.MkdirTemp("", "spool-pull-"); err != nil {
		return fmt.Errorf("make a folder for the session's files: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.staging)) }()
	if err := p.requestSnapshot(ctx, s); err != nil {
		return err
	}
	if err := p.download(ctx); err != nil {
		return err
	}
	if err := p.compare(ctx); err != nil {
		return err
	}
	if len(p.changes) == 0 {
		return p.nothing()
	}
	return p.offer(ctx)
}

// nothing ends a pull without changes.
func (p *pullRun) nothing() error {
	if !p.cmd.JSON {
		fmt.Fprintf(p.app.Out, "nothing to bring back: %s has what the session has\n", terminal.Line(p.folder))
	}
	return p.saveRecord()
}

// offer shows the changes, asks which of them to apply, and applies these.
func (p *pullRun) offer(ctx context.Context) error {
	if !p.cmd.JSON {
		p.show()
	}
	agreed, err := p.agreed(ctx)
	if err != nil {
		return err
	}
	var failed error
	if agreed {
		failed = p.apply()
	}
	for _, c := range p.changes {
		if p.cmd.JSON {
			failed = errors.Join(failed, p.app.json(c))
		}
	}
	if !agreed {
		return failed
	}
	return errors.Join(failed, p.saveRecord(), p.conflictsLeft())
}

// agreed reports whether changes are to be applied. It marks those that the user declines.
func (p *pullRun) agreed(ctx context.Context) (bool, error) {
	if p.cmd.DryRun {
		return false, nil
	}
	if p.cmd.Yes || !slices.ContainsFunc(p.changes, (*change).applicable) {
		return true, nil
	}
	if !p.app.InTTY {
		return false, usage("yes: the changes were not applied: say --yes, or --dry-run to see them only")
	}
	answer, err := p.app.ask(ctx, fmt.Sprintf("spool: bring these changes into %s? [y/N, e asks for each]", terminal.Line(p.folder)))
	switch {
	case err != nil:
		return false, err
	case answer == "e" || answer == "each":
		return p.askEach(ctx)
	}
	return isYes(answer), nil
}

// askEach asks for each change that would be applied, and reports whether any is.
func (p *pullRun) askEach(ctx context.Context) (wanted bool, err error) {
	for _, c := range p.changes {
		if !c.applicable() || c.Conflict && !p.cmd.Force {
			continue
		}
		answer, err := p.app.ask(ctx, fmt.Sprintf("%s %s? [y/N]", changeLetters[c.Change], terminal.Line(c.Path)))
		if err != nil {
			return false, err
		}
		c.declined = !isYes(answer)
		wanted = wanted || !c.declined
	}
	return wanted, nil
}

// saveRecord keeps what the next pull compares with. A pull into a folder other
// than the recorded one changes nothing about that one.
func (p *pullRun) saveRecord() error {
	if p.cmd.DryRun || !sameFolder(p.folder, p.record.Folder) {
		return nil
	}
	return p.record.save(p.recordFile)
}

// conflictsLeft returns an error if changes that nobody declined were not applied.
func (p *pullRun) conflictsLeft() error {
	n := 0
	for _, c := range p.changes {
		if !c.Applied && !c.declined && c.applicable() {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d changes were not brought back: for conflicts --force takes the session's side", n)
}
