package cli

import (
	"fmt"

	"github.com/spoolhq/spool/cmd/runner/internal/volume"
)

// volumeCommand groups the commands for volumes of a fixed size, which run on the engine's machine.
type volumeCommand struct {
	Make   makeFileSystemsCommand   `cmd:"" help:"Make the file systems of volumes, or find them, and attach them to loop devices."`
	Attach attachFileSystemsCommand `cmd:"" help:"Attach the file systems of volumes to loop devices again."`
	Sweep  detachLoopDevicesCommand `cmd:"" help:"Detach loop devices of volumes that were removed."`
	Exceed exceedLimitsCommand      `cmd:"" help:"Write more into a folder than its limits; exit code 0 if that is refused."`
}

// volumeLimits are the flags for the limits of a volume.
type volumeLimits struct {
	Bytes int64 `required:"" help:"Bytes that files may take."`
	Files int64 `required:"" help:"How many files and folders there may be."`
}

// makeFileSystemsCommand creates the file systems of volumes that do not have one, each in a file of fixed size, and
// attaches the files to loop devices.
type makeFileSystemsCommand struct {
	Limits  volumeLimits    `embed:""`
	Volumes []volume.Volume `arg:"" help:"NAME=/folder of each volume."`
}

func (c *makeFileSystemsCommand) Run() error {
	return volume.MakeFileSystems(volume.Limits(c.Limits), c.Volumes)
}

// attachFileSystemsCommand attaches the existing file systems of volumes to loop devices, after a restart of the
// machine.
type attachFileSystemsCommand struct {
	Volumes []volume.Volume `arg:"" help:"NAME=/folder of each volume."`
}

func (c *attachFileSystemsCommand) Run() error { return volume.AttachFileSystems(c.Volumes) }

// detachLoopDevicesCommand detaches the loop devices of volumes that were removed.
type detachLoopDevicesCommand struct{}

func (c *detachLoopDevicesCommand) Run(sys *System) error {
	n, err := volume.DetachUnusedDevices()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(sys.Stdout, "{\"detached\":%d}\n", n)
	return err
}

// exceedLimitsCommand checks that the limits of a volume are enforced: it writes more into a folder than they allow.
type exceedLimitsCommand struct {
	Limits volumeLimits `embed:""`
	Dir    string       `arg:"" help:"The folder."`
}

func (c *exceedLimitsCommand) Run() error { return volume.CheckLimits(c.Dir, volume.Limits(c.Limits)) }
