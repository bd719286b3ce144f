package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type filesPullCommand struct {
	sessionFlags
	Dir    string `arg:"" optional:"" help:"Folder that receives the changes; by default the folder that spool run --workspace uploaded."`
	DryRun bool   `help:"Only show the changes."`
	Yes    bool   `short:"y" help:"Apply the changes without a question, except conflicts."`
	Force  bool   `help:"With --yes or after your confirmation: also apply the session's side of conflicts, which overwrites local changes."`
}

// Run copies the changes in a session's workspace into a local folder.
func (c *filesPullCommand) Run(a *app) error {
	return c.withClientAndPath(a, "dir", "", func(ctx context.Context, cl *client.Client) error {
		s, err := cl.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: c.Session})
		if err != nil {
			return err
		}
		if p := s.GetSessionOptions().GetHostPath(); p != "" {
			return usageError("session: the agent works in %s itself: there is nothing to copy back", p)
		}
		p := &pullRun{app: a, cmd: c, client: cl}
		return p.run(ctx, s)
	})
}

// pullRun is one run of "spool files pull". For each path it compares three versions: the uploaded one, the session's
// and the local one.
type pullRun struct {
	app    *app
	cmd    *filesPullCommand
	client *client.Client

	recordFile string       // path of the file with the upload record
	record     uploadRecord // the last state that the session's workspace and the recorded folder had in common
	folder     string       // the local folder, absolute
	root       *os.Root     // the open folder
	staging    string       // temporary folder with the session's content
	remote     map[string]*remoteEntry
	changes    []*pathChange
}

// run compares the workspace of the session with the local folder, asks the user, and applies the changes.
func (p *pullRun) run(ctx context.Context, s *spoolv1.Session) (err error) {
	if err := p.readUploadRecord(); err != nil {
		return err
	}
	if p.root, err = os.OpenRoot(p.folder); err != nil {
		return usageError("dir: %v", err)
	}
	defer p.root.Close() //nolint:errcheck // errors of the files themselves are checked
	if p.staging, err = os.MkdirTemp("", "spool-pull-"); err != nil {
		return fmt.Errorf("create a folder for the session's files: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.staging)) }()
	if err := p.requestSnapshot(ctx, s); err != nil {
		return err
	}
	if err := p.downloadWorkspace(ctx); err != nil {
		return err
	}
	if err := p.findChanges(ctx); err != nil {
		return err
	}
	if len(p.changes) == 0 {
		return p.finishUnchanged()
	}
	return p.confirmAndApply(ctx)
}

// finishUnchanged prints that the session has changed nothing, and stores the upload record.
func (p *pullRun) finishUnchanged() error {
	if !p.cmd.JSON {
		terminal.Fprintf(p.app.Out, "nothing to copy back: %s equals the session's workspace\n", p.folder)
	}
	return p.saveRecord()
}

// confirmAndApply prints the changes, asks the user which of them to apply, and applies them.
func (p *pullRun) confirmAndApply(ctx context.Context) error {
	if !p.cmd.JSON {
		p.printChanges()
	}
	agreed, err := p.confirmChanges(ctx)
	if err != nil {
		return err
	}
	var failed error
	if agreed {
		failed = p.applyChanges()
	}
	for _, c := range p.changes {
		if p.cmd.JSON {
			failed = errors.Join(failed, p.app.printJSON(c))
		}
	}
	if !agreed {
		return failed
	}
	return errors.Join(failed, p.saveRecord(), p.conflictError())
}

// confirmChanges asks the user and reports whether changes are to be applied. It marks changes that the user declines.
func (p *pullRun) confirmChanges(ctx context.Context) (bool, error) {
	if p.cmd.DryRun {
		return false, nil
	}
	if p.cmd.Yes || !slices.ContainsFunc(p.changes, (*pathChange).isApplicable) {
		return true, nil
	}
	if !p.app.InTTY {
		return false, usageError("yes: the changes were not applied: confirm with --yes, or only show them with --dry-run")
	}
	answer, err := p.app.askUser(ctx, fmt.Sprintf("spool: apply these changes to %s? [y/N, e asks for each]", terminal.SafeLine(p.folder)))
	switch {
	case err != nil:
		return false, err
	case answer == "e" || answer == "each":
		return p.askForEachChange(ctx)
	}
	return isYes(answer), nil
}

// askForEachChange asks the user about each change that would be applied, and reports whether the user accepted any.
func (p *pullRun) askForEachChange(ctx context.Context) (wanted bool, err error) {
	for _, c := range p.changes {
		if !c.isApplicable() || c.Conflict && !p.cmd.Force {
			continue
		}
		answer, err := p.app.askUser(ctx, fmt.Sprintf("%s %s? [y/N]", changeLetters[c.Change], terminal.SafeLine(c.Path)))
		if err != nil {
			return false, err
		}
		c.declined = !isYes(answer)
		wanted = wanted || !c.declined
	}
	return wanted, nil
}

// saveRecord stores the state with which the next pull compares. A pull into another folder than the recorded one does
// not change the record.
func (p *pullRun) saveRecord() error {
	if p.cmd.DryRun || !sameFolder(p.folder, p.record.Folder) {
		return nil
	}
	return p.record.save(p.recordFile)
}

// conflictError returns an error if changes were not applied for another reason than that the user declined them.
func (p *pullRun) conflictError() error {
	n := 0
	for _, c := range p.changes {
		if !c.Applied && !c.declined && c.isApplicable() {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d changes were not applied: --force resolves conflicts in favour of the session", n)
}
