package cli

import (
	"context"
	"log/slog"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
)

// restoreSnapshotCommand is the command restore, which creates the files of the snapshot that the host sends.
type restoreSnapshotCommand struct {
	Trees snapshotFolders `embed:""`
}

func (c *restoreSnapshotCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	roots, err := c.Trees.rootPaths()
	if err != nil {
		return err
	}
	return withExitCode(snapshot.Restorer{Roots: roots, Log: log}.Run(ctx, sys.Stdin, sys.Stdout))
}
