package cli

import (
	"context"
	"errors"
	"log/slog"
	"syscall"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// snapshotFolders are the flags with the two folders of a snapshot.
type snapshotFolders struct {
	Workspace string `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
	State     string `required:"" help:"The state folder." env:"SPOOL_RUNNER_STATE"`
}

// rootPaths returns the absolute paths of the two folders of a snapshot. It refuses the same folders as the command serve.
func (t snapshotFolders) rootPaths() (snapshot.RootPaths, error) {
	place, err := prepareFolders(t.Workspace, t.State)
	return snapshot.RootPaths{Workspace: place.Workspace, State: place.State}, err
}

// takeSnapshotCommand is the command snapshot, which sends the changes of the workspace and the state folder to the
// host.
type takeSnapshotCommand struct {
	Trees   snapshotFolders `embed:""`
	Shared  bool            `help:"The workspace is a folder of a person's, which may be large: leave out what .gitignore and .spoolignore name, and what goes beyond the limits of such folders." env:"SPOOL_RUNNER_SHARED"`
	MaxFile int64           `help:"The largest file that is taken, in bytes; a larger one is left out and reported." default:"17179869184"`
}

func (c *takeSnapshotCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	roots, err := c.Trees.rootPaths()
	if err != nil {
		return err
	}
	if c.MaxFile <= 0 || c.MaxFile > wire.MaxFileSize {
		return errors.New("max-file: must be 1 to 17179869184 bytes")
	}
	return snapshot.Snapshotter{Roots: roots, MaxFile: c.MaxFile, Shared: c.Shared, Log: log}.Run(ctx, sys.Stdin, sys.Stdout)
}

// withExitCode wraps an error that the host distinguishes by its exit code in an exitCodeError, and returns other
// errors unchanged.
func withExitCode(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return exitCodeError{err, wire.ExitDiskFull}
	case errors.Is(err, snapshot.ErrRefused):
		return exitCodeError{err, wire.ExitTarRefused}
	}
	return err
}
