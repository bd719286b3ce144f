package cli

import (
	"context"
	"errors"
	"log/slog"
	"syscall"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// snapshotFolders holds the paths of the two folders of a snapshot.
type snapshotFolders struct {
	Workspace string `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
	State     string `required:"" help:"The state folder." env:"SPOOL_RUNNER_STATE"`
}

// roots returns the folders. It refuses the same folders as serve.
func (t snapshotFolders) roots() (snapshot.Roots, error) {
	place, err := prepareFolders(t.Workspace, t.State)
	return snapshot.Roots{Workspace: place.Workspace, State: place.State}, err
}

type snapshotCommand struct {
	Trees   snapshotFolders `embed:""`
	Shared  bool            `help:"The workspace is a folder of a person's, which may be large: leave out what .gitignore and .spoolignore name, and what goes beyond the limits of such folders." env:"SPOOL_RUNNER_SHARED"`
	MaxFile int64           `help:"The largest file that is taken, in bytes; a larger one is left out and reported." default:"17179869184"`
}

func (c *snapshotCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	roots, err := c.Trees.roots()
	if err != nil {
		return err
	}
	if c.MaxFile <= 0 || c.MaxFile > wire.MaxFileSize {
		return errors.New("max-file: must be 1 to 17179869184 bytes")
	}
	return snapshot.Take{Roots: roots, MaxFile: c.MaxFile, Shared: c.Shared, Log: log}.Run(ctx, sys.Stdin, sys.Stdout)
}

// withExitCode wraps errors that the host distinguishes, each with its own exit code.
func withExitCode(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return codedError{err, wire.ExitDiskFull}
	case errors.Is(err, snapshot.ErrRefused):
		return codedError{err, wire.ExitTarRefused}
	}
	return err
}
