package cli

import (
	"fmt"

	"github.com/spoolhq/spool/cmd/runner/internal/volume"
)

// volumeCommand groups the commands for volumes of a fixed size, which run on the engine's machine.
type volumeCommand struct {
	Make   volumeMakeCommand   `cmd:"" help:"Make the file systems of volumes, or find them, and attach them to loop devices."`
	Attach volumeAttachCommand `cmd:"" help:"Attach the file systems of volumes to loop devices again."`
	Sweep  volumeSweepCommand  `cmd:"" help:"Detach loop devices of volumes that were removed."`
	Exceed volumeExceedCommand `cmd:"" help:"Write more into a folder than its limits; exit code 0 if that is refused."`
}

// volumeLimits are the flags for the limits of a volume.
type volumeLimits struct {
	Bytes int64 `required:"" help:"Bytes that files may take."`
	Files int64 `required:"" help:"How many files and folders there may be."`
}

type volumeMakeCommand struct {
	Limits  volumeLimits    `embed:""`
	Volumes []volume.Volume `arg:"" help:"NAME=/folder of each volume."`
}

func (c *volumeMakeCommand) Run() error { return volume.Make(volume.Limits(c.Limits), c.Volumes) }

type volumeAttachCommand struct {
	Volumes []volume.Volume `arg:"" help:"NAME=/folder of each volume."`
}

func (c *volumeAttachCommand) Run() error { return volume.Attach(c.Volumes) }

type volumeSweepCommand struct{}

func (c *volumeSweepCommand) Run(sys *System) error {
	n, err := volume.Sweep()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(sys.Stdout, "{\"detached\":%d}\n", n)
	return err
}

type volumeExceedCommand struct {
	Limits volumeLimits `embed:""`
	Dir    string       `arg:"" help:"The folder."`
}

func (c *volumeExceedCommand) Run() error { return volume.Exceed(c.Dir, volume.Limits(c.Limits)) }
