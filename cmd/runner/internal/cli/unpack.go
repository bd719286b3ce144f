package cli

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
)

// unpackTarCommand is the command unpack, which unpacks a tar from stdin into a folder of the workspace.
type unpackTarCommand struct {
	Dir        string `arg:"" help:"Folder in the workspace, created if it does not exist; . for the workspace."`
	Workspace  string `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
	MaxEntries int    `help:"How many entries the archive may have." default:"200000"`
	MaxBytes   int64  `help:"How many bytes its files may have together." default:"17179869184"`
}

func (c *unpackTarCommand) Run(ctx context.Context, sys *System) error {
	if c.MaxEntries <= 0 || c.MaxBytes <= 0 {
		return errors.New("max-entries, max-bytes: must be greater than 0")
	}
	u := snapshot.Unpacker{Workspace: c.Workspace, Dir: c.Dir, MaxEntries: c.MaxEntries, MaxBytes: c.MaxBytes}
	done, err := u.Run(ctx, sys.Stdin)
	if err != nil {
		return withExitCode(err)
	}
	return sys.printJSON(map[string]any{"type": "archive_unpacked", "files": done.Files, "bytes": done.Bytes})
}
