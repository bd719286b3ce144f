package docker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// The modes that enforce the disk limits of volumes.
const (
	// DiskLimitAuto means the first of DiskLimitLoop and DiskLimitQuota that the engine can enforce, or else DiskLimitWatch.
	DiskLimitAuto = "auto"
	// DiskLimitLoop backs each volume by a file with a file system of the volume's size: bytes and files are limited.
	DiskLimitLoop = "loop"
	// DiskLimitQuota uses the project quota of the engine's file system: bytes are limited, files are not.
	DiskLimitQuota = "quota"
	// DiskLimitWatch means that the engine enforces nothing: the runner measures the disk usage, and ends a turn that
	// exceeds the limit.
	DiskLimitWatch = "watch"
)

// DiskLimits returns the values of Config.DiskLimit.
func DiskLimits() []string {
	return []string{DiskLimitAuto, DiskLimitLoop, DiskLimitQuota, DiskLimitWatch}
}

const (
	// diskNodeDir is the folder of the device nodes that the program "runner volume" creates on the engine's machine.
	diskNodeDir = "/dev/spool/"
	// bytesPerFile determines how many files a volume may hold: one for each bytesPerFile bytes of the volume, but at least minVolumeFiles.
	bytesPerFile   = 4096
	minVolumeFiles = 1024
	// minVolumeBytes is the minimum size of a volume, in bytes.
	minVolumeBytes = 1 << 20
	// volumeToolTimeout is the time limit of one run of the program "runner volume" on the engine's machine.
	volumeToolTimeout = 2 * time.Minute
	// loopSweepInterval is the interval at which the executor looks for loop devices of removed volumes, even if it has removed no volume
	// itself.
	loopSweepInterval = time.Hour

	probeVolumeBytes = 16 << 20
	probeVolumeFiles = minVolumeFiles
)

// diskState is the provider's state about the enforcement of disk limits: the chosen mode, and when loop devices were last swept.
type diskState struct {
	choosing sync.Mutex // one probe at a time; locked before mu

	mu        sync.Mutex
	mode      string // "" until it is chosen
	used      bool   // loop devices may exist
	swept     time.Time
	sweeping  bool
	again     bool
	sweepings sync.WaitGroup
}

// DiskLimit returns the mode that enforces the disk limits: DiskLimitLoop, DiskLimitQuota or DiskLimitWatch, or "" until ChooseDiskLimit has
// chosen one.
func (p *Provider) DiskLimit() string {
	p.disks.mu.Lock()
	defer p.disks.mu.Unlock()
	return p.disks.mode
}

// ErrDiskLimit is returned if the engine cannot enforce limits in the configured mode.
var ErrDiskLimit = errors.New("SPOOL_SANDBOX_DISK_LIMIT: the Docker engine cannot enforce disk limits this way")

// ChooseDiskLimit returns the mode that enforces the disk limits. The first call proves the mode on the engine, by
// writing more than the limits of a small volume. DiskLimitAuto always finds a mode. Errors other than ErrDiskLimit do not
// concern a mode: for example, the engine does not answer, or does not have the image.
func (p *Provider) ChooseDiskLimit(ctx context.Context) (string, error) {
	p.disks.choosing.Lock()
	defer p.disks.choosing.Unlock()
	if mode := p.DiskLimit(); mode != "" {
		return mode, nil
	}
	candidates := []string{p.cfg.DiskLimit}
	if p.cfg.DiskLimit == DiskLimitAuto {
		candidates = []string{DiskLimitLoop, DiskLimitQuota, DiskLimitWatch}
	}
	var refused []error
	for _, mode := range candidates {
		err := p.probeDiskLimit(ctx, mode)
		if errors.Is(err, errVanished) { // the runner's volume, which another executor's sweep removed
			err = p.probeDiskLimit(ctx, mode)
		}
		if err == nil {
			p.setDiskMode(mode, errors.Join(refused...))
			return mode, nil
		}
		var typed *sandbox.Error
		if errors.As(err, &typed) || errors.Is(err, errVanished) || ctx.Err() != nil {
			return "", fmt.Errorf("choose what enforces disk limits: %w", err)
		}
		refused = append(refused, fmt.Errorf("%s: %w", mode, err))
	}
	return "", fmt.Errorf("%w: engine %s: %w: use auto, or one of %s", ErrDiskLimit, p.api.DaemonHost(), errors.Join(refused...), strings.Join(DiskLimits()[1:], ", "))
}

// setDiskMode stores the mode that enforces disk limits, and logs which limits that mode does not enforce.
func (p *Provider) setDiskMode(mode string, refused error) {
	p.disks.mu.Lock()
	p.disks.mode = mode
	p.disks.mu.Unlock()
	log := p.cfg.Logger.With("mode", mode)
	if refused != nil {
		log = log.With("refused", refused)
	}
	switch mode {
	case DiskLimitWatch:
		log.Warn("the disk limits of sandboxes are watched, not enforced: a sandbox can fill the disk of the engine before its turn is ended")
	case DiskLimitQuota:
		log.Info("chose what enforces the disk limits of sandboxes; the number of files is not limited")
	default:
		log.Info("chose what enforces the disk limits of sandboxes")
	}
}

// diskLimit returns the mode that enforces the disk limits of new volumes. It returns the mode of Config even if ChooseDiskLimit has not
// proved it yet.
func (p *Provider) diskLimit(ctx context.Context) (string, error) {
	if mode := cmp.Or(p.DiskLimit(), strings.TrimPrefix(p.cfg.DiskLimit, DiskLimitAuto)); mode != "" {
		return mode, nil
	}
	return p.ChooseDiskLimit(ctx)
}

// diskOptions returns the options of the volume driver for a new volume of the given size, in a mode that enforces disk limits.
func diskOptions(mode, name string, bytes int64) map[string]string {
	switch mode {
	case DiskLimitLoop:
		return map[string]string{"type": "ext4", "device": diskNodeDir + name, "o": "discard,nosuid,nodev"}
	case DiskLimitQuota:
		return map[string]string{"size": strconv.FormatInt(bytes, 10)}
	}
	return nil
}

// isLoopVolume reports whether a volume was created with DiskLimitLoop, so that it has its own file system.
func isLoopVolume(v volume.Volume) bool { return v.Options["device"] == diskNodeDir+v.Name }

// createLimitedVolumes creates volumes with the given names and labels, each of which can hold the given number of bytes. It does nothing
// for volumes that exist.
func (p *Provider) createLimitedVolumes(ctx context.Context, bytes int64, labels map[string]string, names ...string) error {
	mode, err := p.diskLimit(ctx)
	if err != nil {
		return err
	}
	bytes = max(bytes, minVolumeBytes)
	return p.createVolumesInMode(ctx, mode, bytes, min(p.cfg.Files, max(bytes/bytesPerFile, minVolumeFiles)), labels, names...)
}

// createVolumesInMode creates volumes whose size is limited in the given mode, unless they exist. With DiskLimitLoop it also creates their
// file systems of the given size and number of files.
func (p *Provider) createVolumesInMode(ctx context.Context, mode string, bytes, files int64, labels map[string]string, names ...string) error {
	for _, name := range names {
		err := p.callEngineNoResult(ctx, "make volume "+name, func(ctx context.Context) error {
			_, err := p.api.VolumeCreate(ctx, volume.CreateOptions{Name: name, Labels: labels, Driver: "local", DriverOpts: diskOptions(mode, name, bytes)})
			return err
		})
		if err != nil {
			return err
		}
	}
	list, err := p.loopVolumes(ctx, names)
	if err != nil || len(list) == 0 {
		return err
	}
	p.disks.mu.Lock()
	p.disks.used = true
	p.disks.mu.Unlock()
	return p.runVolumeTool(ctx, list, "make", "--bytes", strconv.FormatInt(bytes, 10), "--files", strconv.FormatInt(files, 10))
}

// loopVolumes returns the volumes among names that were created with DiskLimitLoop.
func (p *Provider) loopVolumes(ctx context.Context, names []string) ([]volume.Volume, error) {
	var out []volume.Volume
	for _, name := range names {
		v, err := callEngine(ctx, p, "look up volume "+name, func(ctx context.Context) (volume.Volume, error) { return p.api.VolumeInspect(ctx, name) })
		switch {
		case errdefs.IsNotFound(err):
			return nil, fmt.Errorf("volume %s: %w", name, errVanished)
		case err != nil:
			return nil, err
		case isLoopVolume(v):
			out = append(out, v)
		}
	}
	return out, nil
}

// reattachVolumes attaches the loop devices of a container's volumes, which a reboot of the engine's machine detaches. It reports whether
// there were any.
func (p *Provider) reattachVolumes(ctx context.Context, containerID string) (bool, error) {
	got, err := callEngine(ctx, p, "look at the volumes", func(ctx context.Context) (container.InspectResponse, error) {
		return p.api.ContainerInspect(ctx, containerID)
	})
	if err != nil {
		return false, err
	}
	var names []string
	for _, m := range got.Mounts {
		if m.Type == mount.TypeVolume && !slices.Contains(names, m.Name) {
			names = append(names, m.Name)
		}
	}
	list, err := p.loopVolumes(ctx, names)
	if err != nil || len(list) == 0 {
		return false, err
	}
	return true, p.runVolumeTool(ctx, list, "attach")
}

// runVolumeTool runs the program "runner volume" on the engine's machine, in a container that has loop devices and the folders of the
// volumes. The container uses the operator's image, never an image that a tenant named.
func (p *Provider) runVolumeTool(ctx context.Context, volumes []volume.Volume, args ...string) error {
	pic, r, err := p.prepareVolumeTool(ctx)
	if err != nil {
		return err
	}
	host := &container.HostConfig{
		NetworkMode: "none", UsernsMode: "host", CapDrop: []string{"ALL"}, CapAdd: []string{"MKNOD"}, SecurityOpt: []string{"no-new-privileges"}, ReadonlyRootfs: true,
		LogConfig: smallLogConfig(),
		Resources: container.Resources{DeviceCgroupRules: []string{"b 7:* rwm", "c 10:237 rwm"}}, // loop devices, and the device that finds a free one
		Mounts: []mount.Mount{
			{Type: mount.TypeBind, Source: "/dev", Target: "/dev"},
			helperVolume{name: r.volumeName()}.mount(binDir, true),
		},
	}
	command := append([]string{"volume"}, args...)
	for n, v := range volumes {
		dir := "/v/" + strconv.Itoa(n)
		host.Mounts = append(host.Mounts, mount.Mount{Type: mount.TypeBind, Source: path.Dir(v.Mountpoint), Target: dir})
		command = append(command, v.Name+"="+dir)
	}
	config := &container.Config{Image: pic.ref, User: "0:0", Entrypoint: []string{runnerPath}, Cmd: command, WorkingDir: "/"}
	return p.runToolContainer(ctx, "run volume "+args[0], r, config, host)
}

// prepareVolumeTool copies the runner to the engine, and returns the operator's image and the runner.
func (p *Provider) prepareVolumeTool(ctx context.Context) (imageInfo, *runnerBinary, error) {
	pic, err := p.lookUpAllowedImage(ctx, imageFields, p.cfg.Image)
	if err != nil {
		return pic, nil, err
	}
	r, err := p.runnerForImage(pic)
	if err != nil {
		return pic, nil, err
	}
	return pic, r, p.fillRunnerVolume(ctx, r, pic.ref)
}

// runToolContainer creates and runs a container, blocks until it has ended, and removes it. If the container fails, the error contains the
// end of its output.
func (p *Provider) runToolContainer(ctx context.Context, what string, r *runnerBinary, config *container.Config, host *container.HostConfig) error {
	ctx, cancel := context.WithTimeout(ctx, volumeToolTimeout)
	defer cancel()
	config.Labels = map[string]string{labelVersion: labelsVersion, labelRole: roleHelper, labelEngine: p.cfg.Engine}
	config.Healthcheck = &container.HealthConfig{Test: []string{"NONE"}}
	made, err := callEngine(ctx, p, what, func(ctx context.Context) (container.CreateResponse, error) {
		return p.api.ContainerCreate(ctx, config, host, nil, nil, "")
	})
	if err != nil {
		return err
	}
	defer p.discardHelper(ctx, made.ID)
	if err := p.checkRunnerVolume(ctx, r); err != nil {
		p.discardHelper(ctx, made.ID)
		_, rerr := p.removeVolume(ctx, r.volumeName()) // empty, created by the engine
		return fmt.Errorf("%s: %w", what, errors.Join(err, rerr))
	}
	ended, errs := p.api.ContainerWait(ctx, made.ID, container.WaitConditionNextExit)
	if err := p.startContainerOnce(ctx, made.ID); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	select {
	case end := <-ended:
		if end.StatusCode == 0 {
			return nil
		}
		return p.translateError(ctx, what, fmt.Errorf("exit code %d: %s", end.StatusCode, p.outputTail(ctx, made.ID)))
	case err := <-errs:
		return p.translateError(ctx, what, err)
	}
}

// probeUser is the user of the container that tests a disk limit. It is not root.
var probeUser = user{id: serviceImageUser}

// probeDiskLimit returns an error unless a mode enforces disk limits. To test that, it writes more into a small volume than the limits
// allow.
func (p *Provider) probeDiskLimit(ctx context.Context, mode string) error {
	if mode == DiskLimitWatch {
		return nil
	}
	if p.cfg.Image == "" {
		return errors.New("there is no default image to try it with")
	}
	id := strings.ToLower(rand.Text())
	name := namePrefix + "probe-" + id
	defer p.removeVolumes(context.WithoutCancel(ctx), name)
	// If this process is killed, the sweep finds a workspace without an owner.
	err := p.createVolumesInMode(ctx, mode, probeVolumeBytes, probeVolumeFiles, map[string]string{labelVersion: labelsVersion, labelRole: roleVolume, labelEngine: p.cfg.Engine, labelVolumesOwner: id}, name)
	if err != nil {
		return err
	}
	pic, r, err := p.prepareVolumeTool(ctx)
	if err != nil {
		return err
	}
	if err := p.prepareVolumes(ctx, pic, probeUser, "", "", volumeFolder{helperVolume{name, "work"}, 0o700}); err != nil {
		return err
	}
	if mode == DiskLimitQuota {
		return p.exceedLimits(ctx, pic, r, name, 0)
	}
	return p.exceedLimits(ctx, pic, r, name, probeVolumeFiles)
}

// exceedLimits tries to write more into a volume than its limits allow, from a container with the same restrictions as a sandbox. It
// returns an error if the write succeeds.
func (p *Provider) exceedLimits(ctx context.Context, pic imageInfo, r *runnerBinary, name string, files int) error {
	host := p.restrictedHostConfig(p.cfg.Limits)
	host.NanoCPUs, host.Mounts = 0, []mount.Mount{helperVolume{name: name}.mount(workspaceDir, false), helperVolume{name: r.volumeName()}.mount(binDir, true)}
	return p.runToolContainer(ctx, "exceed the limits of a volume", r, &container.Config{
		Image: pic.ref, User: probeUser.String(), Entrypoint: []string{runnerPath}, WorkingDir: "/",
		Cmd: []string{"volume", "exceed", "--bytes", strconv.Itoa(probeVolumeBytes), "--files", strconv.Itoa(files), workspaceDir},
	}, host)
}

// removeVolumes removes volumes and detaches their loop devices. A volume that cannot be removed stays until a later sweep.
func (p *Provider) removeVolumes(ctx context.Context, names ...string) {
	for _, name := range names {
		if _, err := p.removeVolume(ctx, name); err != nil {
			p.cfg.Logger.Warn("a volume stays until the sweep", "volume", name, "error", err)
		}
	}
	p.reclaimSpace()
}

// reclaimSpace detaches the loop devices of removed volumes in the background; until then the removed volumes use disk space. Calls while a
// run is in progress cause one more run.
func (p *Provider) reclaimSpace() {
	d := &p.disks
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.used {
		return
	}
	d.again = true
	if d.sweeping {
		return
	}
	d.sweeping = true
	d.sweepings.Go(func() {
		for p.continueLoopSweep() {
			if err := p.sweepLoopDevices(context.Background()); err != nil {
				p.cfg.Logger.Warn("loop devices of volumes that were removed stay until the sweep", "error", err)
			}
		}
	})
}

// continueLoopSweep reports whether reclaimSpace was called since the last run of sweepLoopDevices began, so that another run must follow.
// If not, it records that no run is in progress.
func (p *Provider) continueLoopSweep() bool {
	p.disks.mu.Lock()
	defer p.disks.mu.Unlock()
	next := p.disks.again
	p.disks.again, p.disks.sweeping = false, next
	return next
}

// sweepLoopDevices detaches the loop devices whose volume was removed, by this program or another one.
func (p *Provider) sweepLoopDevices(ctx context.Context) error {
	err := p.runVolumeTool(ctx, nil, "sweep")
	if errors.Is(err, errVanished) { // the runner's volume, which another executor's sweep removed
		err = p.runVolumeTool(ctx, nil, "sweep")
	}
	p.disks.mu.Lock()
	defer p.disks.mu.Unlock()
	p.disks.swept = time.Now()
	if err != nil {
		p.disks.swept = time.Time{} // RemoveOrphans tries again
	}
	return err
}

// sweepLoopDevicesIfDue calls sweepLoopDevices if loopSweepInterval has passed since the last run and loop devices may exist. list are the
// volumes of the engine: loop devices may exist if one of them has one, also if another executor or an earlier setting created it.
func (p *Provider) sweepLoopDevicesIfDue(ctx context.Context, list []*volume.Volume) error {
	seen := slices.ContainsFunc(list, func(v *volume.Volume) bool { return isLoopVolume(*v) })
	p.disks.mu.Lock()
	p.disks.used = p.disks.used || seen
	due := p.disks.used && time.Since(p.disks.swept) >= loopSweepInterval
	p.disks.mu.Unlock()
	if !due {
		return nil
	}
	return p.sweepLoopDevices(ctx)
}
