package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/go-units"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// Paths in a sandbox.
const (
	workspaceDir   = "/workspace"
	workspaceAlias = "/mnt/workspace"
	homeDir        = "/home/spool"
	stateDir       = "/spool/state"
	runDir         = "/spool/run"
	binDir         = "/spool/bin"
	runnerPath     = binDir + "/runner"
	egressDir      = "/run/spool/egress"
	egressSocket   = egressDir + "/egress.sock"
	mcpSocketsDir  = "/spool/mcp"
	defaultPATH    = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// runFolderBytes is the size limit in bytes of the in-memory folder runDir, in which the runner keeps its socket and other files.
const runFolderBytes = 1 << 20

// maxCreateAttempts is the maximum number of attempts to create a container. Another attempt follows only after errVanished; every other
// error ends the creation.
const maxCreateAttempts = 20

// errVanished is returned when another executor has removed a container or a volume that this executor has just looked up, or has created
// the same container first. The caller may look it up again.
var errVanished = errors.New("it was removed meanwhile")

// Create creates a sandbox and blocks until its runner answers. If a sandbox with the id exists, Create returns that one, and starts its
// container if the container has stopped.
func (p *Provider) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := p.checkSpec(spec); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	var err error
	for range maxCreateAttempts {
		var b *box
		var c listedSandbox
		c, err = p.findSandbox(ctx, spec.ID)
		if errors.Is(err, sandbox.ErrNotFound) {
			b, err = p.createNew(ctx, spec)
		} else if err == nil {
			b, err = p.reuseContainer(ctx, c)
		}
		if err == nil {
			return b, nil
		}
		if !errors.Is(err, errVanished) {
			break
		}
		if retry.Pause(ctx, enginePollInterval) != nil {
			return nil, ctx.Err()
		}
	}
	return nil, guest.WithCode(sandbox.CodeSandboxFailed, "create sandbox "+spec.ID, err)
}

// checkSpec returns an error if a Spec is invalid or this provider cannot fulfil it.
func (p *Provider) checkSpec(spec sandbox.Spec) error {
	err := errors.Join(events.CheckID("sandbox id", events.KindSandbox, spec.ID), p.checkLabels(spec.Labels))
	if spec.Workspace != "" {
		err = errors.Join(err, events.CheckID("workspace", events.KindSandbox, spec.Workspace))
	}
	if spec.Servers < 0 || spec.Servers > maxMCPServers {
		err = errors.Join(err, fmt.Errorf("servers: %d is not between 0 and %d", spec.Servers, maxMCPServers))
	}
	if l := spec.Limits; l.MemoryBytes < 0 || l.CPUs < 0 || l.PIDs < 0 || l.DiskBytes < 0 {
		err = errors.Join(err, errors.New("limits: they cannot be negative"))
	}
	if spec.HostPath != "" {
		err = errors.Join(err, errors.New("host path: a container has its own workspace"))
	}
	if spec.EgressToken != "" && p.cfg.EgressSockets == "" {
		err = errors.Join(err, errors.New("egress token: this provider has no egress sockets: set EgressSockets"))
	}
	if v := spec.Layer + spec.LayerTarget; v != "" && (!strings.HasPrefix(v, layerPrefix) || spec.Layer != "" && spec.LayerTarget != "") {
		err = errors.Join(err, fmt.Errorf("layer: %q does not belong to this provider", v))
	}
	return err
}

// containerPlan holds everything from which the container of a new sandbox is configured: image, volumes, user and runner.
type containerPlan struct {
	spec   sandbox.Spec
	limits sandbox.Limits
	pic    imageInfo
	runner *runnerBinary
	secret string // the secret with which executors prove themselves to the runner
	owner  string // the sandbox after which the volumes are named
	user   user   // of the processes and the volumes
	kept   bool
}

// createNew creates a new sandbox and blocks until its runner answers. After an error it removes what it created. The error wraps
// errVanished if another attempt may succeed.
func (p *Provider) createNew(ctx context.Context, spec sandbox.Spec) (*box, error) {
	pl, err := p.prepareContainer(ctx, spec)
	if err != nil {
		return nil, err
	}
	if pl.owner != spec.ID {
		if err := p.recordVolumesOwner(ctx, spec.ID, pl.owner); err != nil {
			return nil, err
		}
	}
	if err := p.createSockets(ctx, spec); err != nil {
		return nil, err
	}
	config, host := p.containerConfig(pl)
	made, err := callEngine(ctx, p, "make the container", func(ctx context.Context) (container.CreateResponse, error) {
		return p.api.ContainerCreate(ctx, config, host, nil, nil, containerName(spec.ID))
	})
	if errdefs.IsConflict(err) {
		return nil, fmt.Errorf("%w: another executor makes it: %w", errVanished, err) // the next attempt finds it
	}
	err = pl.user.wrapVanished(err)
	if err == nil {
		err = p.checkVolumes(ctx, pl)
	}
	if err == nil {
		err = p.startContainer(ctx, made.ID)
	}
	b := &box{p: p, id: spec.ID, container: made.ID, secret: pl.secret, kept: pl.kept}
	if err == nil {
		err = b.awaitReady(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, p.undoCreate(context.WithoutCancel(ctx), pl, made.ID))
	}
	if spec.Workspace != "" && spec.Workspace != spec.ID {
		// The note of the earlier sandbox, if there is one, is not needed any more.
		if _, err := p.removeVolume(ctx, noteVolumeName(spec.Workspace)); err != nil {
			p.cfg.Logger.Warn("a note stays until the sweep", "sandbox", spec.Workspace, "error", err)
		}
	}
	return b, nil
}

// prepareContainer creates what the container of a new sandbox needs on the engine, such as the image, the volumes and the user, and
// returns the plan of the container.
func (p *Provider) prepareContainer(ctx context.Context, spec sandbox.Spec) (containerPlan, error) {
	pl := containerPlan{spec: spec, owner: spec.ID, secret: runner.NewSecret(), limits: overlayLimits(p.cfg.Limits, spec.Limits)}
	cpus, err := p.engineCPUs(ctx)
	if err != nil {
		return pl, err
	}
	pl.limits.CPUs = min(pl.limits.CPUs, float64(cpus))
	ref := spec.Image
	if ref == "" {
		ref = p.cfg.Image
	}
	if pl.pic, err = p.lookUpAllowedImage(ctx, imageFields, ref); err != nil {
		return pl, err
	}
	if pl.runner, err = p.runnerForImage(pl.pic); err != nil {
		return pl, err
	}
	if err := p.fillRunnerVolume(ctx, pl.runner, ref); err != nil {
		return pl, err
	}
	if err := p.createSkillsVolume(ctx, ref); err != nil {
		return pl, err
	}
	if spec.Workspace != "" {
		owner, err := p.volumesOwner(ctx, spec.Workspace)
		if err != nil {
			return pl, err
		}
		if pl.kept, err = p.volumesExist(ctx, owner); err != nil {
			return pl, err
		}
		if pl.kept {
			pl.owner = owner
			if pl.user, err = p.volumesUser(ctx, owner); err != nil {
				return pl, err
			}
			return pl, p.prepareVolumes(ctx, pl.pic, pl.user, defaultUserName, homeDir)
		}
	}
	pl.user, err = p.createVolumes(ctx, pl)
	return pl, err
}

// checkVolumes returns an error unless the new container mounts the volumes that were prepared for it. A sweep may have removed a volume
// before the container used it; the engine then created an empty volume of the same name. The error wraps errVanished, except for a
// dependency layer, which the caller cannot create again.
func (p *Provider) checkVolumes(ctx context.Context, pl containerPlan) error {
	if err := p.checkRunnerVolume(ctx, pl.runner); err != nil {
		return err
	}
	skills := SkillsVolume(p.cfg.Engine)
	l, err := p.volumeLabels(ctx, skills)
	if err != nil {
		return err
	}
	if l[labelSkills] == "" {
		return fmt.Errorf("volume %s: %w", skills, errVanished)
	}
	if v := cmp.Or(pl.spec.Layer, pl.spec.LayerTarget); v != "" {
		if l, err = p.volumeLabels(ctx, v); err == nil && l[labelRole] != roleLayer {
			err = fmt.Errorf("layer %s: it was removed just now: send the message again", v)
		}
		if err != nil {
			return err
		}
	}
	if err := p.checkUserVolume(ctx, pl.user, p.reservationLabels(pl.owner)); err != nil {
		return err
	}
	there, err := p.volumesExist(ctx, pl.owner)
	if err == nil && !there {
		return fmt.Errorf("workspace of %s: %w", pl.owner, errVanished)
	}
	return err
}

// checkRunnerVolume returns an error that wraps errVanished if the engine has replaced the runner's volume by an empty one, after a sweep
// removed it.
func (p *Provider) checkRunnerVolume(ctx context.Context, r *runnerBinary) error {
	l, err := p.volumeLabels(ctx, r.volumeName())
	if err != nil || l[labelRole] == roleRunner {
		return err
	}
	r.forgetVolume()
	return fmt.Errorf("volume %s: %w", r.volumeName(), errVanished)
}

// undoCreate removes everything that was created for a sandbox whose creation failed. It keeps a workspace that was taken over from another
// sandbox.
func (p *Provider) undoCreate(ctx context.Context, pl containerPlan, containerID string) error {
	var err error
	if containerID != "" {
		err = p.removeContainer(ctx, containerID)
	}
	doomed := []string{}
	skills := SkillsVolume(p.cfg.Engine)
	if l, lerr := p.volumeLabels(ctx, skills); lerr == nil && l[labelSkills] == "" {
		doomed = append(doomed, skills) // empty, created by the engine
	}
	if v := cmp.Or(pl.spec.Layer, pl.spec.LayerTarget); v != "" {
		if l, lerr := p.volumeLabels(ctx, v); lerr == nil && l[labelRole] != roleLayer {
			doomed = append(doomed, v) // empty, created by the engine
		}
	}
	for n := range pl.spec.Servers {
		doomed = append(doomed, socketVolumeName(pl.spec.ID, n))
	}
	if !pl.kept {
		doomed = append(doomed, workspaceVolumeName(pl.spec.ID), stateVolumeName(pl.spec.ID))
	}
	if pl.owner != pl.spec.ID {
		doomed = append(doomed, noteVolumeName(pl.spec.ID))
	}
	if l, lerr := p.volumeLabels(ctx, pl.runner.volumeName()); lerr == nil && l[labelRole] != roleRunner {
		doomed = append(doomed, pl.runner.volumeName()) // empty, created by the engine
	}
	if l, lerr := p.volumeLabels(ctx, userVolumeName(pl.user.id)); lerr == nil && l[labelRole] != roleUser {
		doomed = append(doomed, userVolumeName(pl.user.id)) // empty, created by the engine
	}
	for _, v := range doomed {
		_, rerr := p.removeVolume(ctx, v)
		err = errors.Join(err, rerr)
	}
	p.reclaimSpace()
	return errors.Join(err, p.releaseUsers(ctx, pl.owner)) // keeps the user while the workspace exists
}

// reuseContainer returns the sandbox of an existing container. It starts or resumes the container if necessary.
func (p *Provider) reuseContainer(ctx context.Context, c listedSandbox) (*box, error) {
	b := &box{p: p, id: c.id, container: c.container, secret: c.secret, kept: c.owner != c.id}
	switch c.state {
	case container.StateRunning:
	case container.StatePaused:
		if err := p.Resume(ctx, c.id); err != nil {
			return nil, err
		}
	case container.StateRemoving, container.StateDead:
		if err := p.removeContainer(ctx, c.container); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("container of %s: %w", c.id, errVanished)
	default:
		if err := p.startContainer(ctx, c.container); err != nil {
			if errdefs.IsNotFound(err) {
				return nil, fmt.Errorf("container of %s: %w", c.id, errVanished)
			}
			return nil, err
		}
	}
	if err := b.awaitReady(ctx); err != nil || b.kept || c.state != container.StateExited {
		return b, err
	}
	// The container ran before. Its files count as kept, unless it has none because nothing was ever restored into it.
	left, err := b.Files().List(ctx, "")
	b.kept = len(left) > 0
	return b, err
}

// startContainer starts a container; it returns nil if the container already runs. If the container's volumes cannot be mounted, it
// attaches their loop devices, which do not survive a restart of the machine, and tries once more.
func (p *Provider) startContainer(ctx context.Context, containerID string) error {
	err := p.startContainerOnce(ctx, containerID)
	if err == nil || errdefs.IsNotFound(err) || guest.IsUnavailable(err) || ctx.Err() != nil {
		return err
	}
	attached, aerr := p.reattachVolumes(ctx, containerID)
	if aerr != nil || !attached {
		return errors.Join(err, aerr)
	}
	p.cfg.Logger.Info("attached the volumes of a container again", "container", containerID, "reason", err)
	return p.startContainerOnce(ctx, containerID)
}

// startContainerOnce starts a container; it returns nil if the container already runs.
func (p *Provider) startContainerOnce(ctx context.Context, containerID string) error {
	return p.callEngineNoResult(ctx, "start the container", func(ctx context.Context) error {
		return p.api.ContainerStart(ctx, containerID, container.StartOptions{})
	})
}

// containerConfig returns the hardened configuration of a sandbox's container.
func (p *Provider) containerConfig(pl containerPlan) (*container.Config, *container.HostConfig) {
	config := &container.Config{
		Image: pl.pic.ref, Entrypoint: []string{runnerPath, "serve"}, WorkingDir: workspaceDir, Hostname: "sandbox",
		User: pl.user.String(), Env: p.environment(pl), StopSignal: "SIGTERM",
		Labels:      sandboxLabels(pl),
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
	}
	host := p.restrictedHostConfig(pl.limits)
	host.Tmpfs, host.Mounts = p.tmpfs(pl.pic, pl.user), p.mounts(pl)
	return config, host
}

// restrictedHostConfig returns a host configuration with the restrictions of every container in which an agent or an MCP server runs.
func (p *Provider) restrictedHostConfig(l sandbox.Limits) *container.HostConfig {
	return &container.HostConfig{
		NetworkMode: "none", IpcMode: container.IPCModePrivate, Runtime: p.cfg.Runtime,
		CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"}, ReadonlyRootfs: true,
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
		LogConfig:     smallLogConfig(),
		Resources: container.Resources{
			Memory: l.MemoryBytes, MemorySwap: l.MemoryBytes, // equal: no swap
			NanoCPUs: int64(l.CPUs * 1e9), PidsLimit: &l.PIDs,
			Ulimits: ulimits(),
		},
	}
}

// ulimits returns the resource limits of a container's processes. None is high, because a Docker engine without the capability SYS_RESOURCE
// cannot exceed its own hard limits.
func ulimits() []*units.Ulimit {
	var out []*units.Ulimit
	for _, l := range []struct {
		name string
		n    int64
	}{
		{"core", 0}, // no core files in the workspace
		{"nofile", 16384},
		{"sigpending", 1024},
		{"msgqueue", 819200},  // bytes
		{"memlock", 64 << 10}, // bytes
	} {
		out = append(out, &units.Ulimit{Name: l.name, Soft: l.n, Hard: l.n})
	}
	return out
}

// smallLogConfig returns a log configuration that keeps only the end of a container's output.
func smallLogConfig() container.LogConfig {
	return container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "1m", "max-file": "1"}}
}

// environment returns the environment variables that all processes in a sandbox have, in addition to the variables of the image and of each
// process.
func (p *Provider) environment(pl containerPlan) []string {
	path := pl.pic.path
	if path == "" {
		path = defaultPATH
	}
	if pl.spec.Layer != "" {
		path = strings.Join(append(layer.ProgramFolders(layerDir), path), ":")
	}
	env := []string{
		"PATH=" + path, "HOME=" + homeDir, "LANG=C.UTF-8",
		"SPOOL_RUNNER_SOCKET=" + runDir + "/runner.sock", "SPOOL_RUNNER_WORKSPACE=" + workspaceDir, "SPOOL_RUNNER_STATE=" + stateDir,
		"SPOOL_RUNNER_DISK_LIMIT=" + strconv.FormatInt(pl.limits.DiskBytes, 10),
	}
	if pl.spec.Layer != "" {
		env = append(env, layer.PackageVariables(layerDir)...)
	}
	if pl.spec.EgressToken != "" {
		env = append(env, "SPOOL_RUNNER_EGRESS_SOCKET="+egressSocket, "SPOOL_RUNNER_EGRESS_TOKEN="+pl.spec.EgressToken)
	}
	return env
}

// shmDir is the folder of shared memory, of the engine's default size.
const shmDir = "/dev/shm"

// shmOptions are the mount options of shmDir.
var shmOptions = "rw,noexec,nosuid,nodev,mode=1777," + tmpfsLimit(64<<20)

// tmpfsLimit returns the mount options that limit a tmpfs to a number of bytes, and to one file for each page of that size.
func tmpfsLimit(bytes int64) string {
	return fmt.Sprintf("size=%d,nr_inodes=%d", bytes, max(bytes/bytesPerFile, 64))
}

// tmpfs returns the folders of a sandbox's container that are in memory, with their mount options. They include the volumes that the image
// declares, because no limit would apply to such a volume on disk.
func (p *Provider) tmpfs(pic imageInfo, u user) map[string]string {
	own := fmt.Sprintf(",mode=0700,uid=%d,gid=%d", u.id, u.id)
	size := "rw,exec,nosuid,nodev," + tmpfsLimit(p.cfg.TmpBytes)
	out := map[string]string{shmDir: shmOptions}
	for _, v := range pic.volumes {
		out[filepath.Clean(v)] = size + own
	}
	out["/tmp"] = size + ",mode=1777"
	out[homeDir] = size + own
	out[runDir] = "rw,noexec,nosuid,nodev," + tmpfsLimit(runFolderBytes) + own
	for _, taken := range []string{workspaceDir, workspaceAlias, stateDir, binDir, skillsDir, layerDir, egressDir, mcpSocketsDir, userDir} {
		delete(out, taken)
	}
	return out
}

// mounts returns the volume mounts of a sandbox's container.
func (p *Provider) mounts(pl containerPlan) []mount.Mount {
	work := helperVolume{name: workspaceVolumeName(pl.owner)}
	out := []mount.Mount{
		work.mount(workspaceDir, false), work.mount(workspaceAlias, false),
		helperVolume{name: stateVolumeName(pl.owner)}.mount(stateDir, false),
		helperVolume{name: pl.runner.volumeName()}.mount(binDir, true),
		helperVolume{name: SkillsVolume(p.cfg.Engine)}.mount(skillsDir, true),
	}
	if v := cmp.Or(pl.spec.Layer, pl.spec.LayerTarget); v != "" {
		out = append(out, helperVolume{name: v}.mount(layerDir, pl.spec.LayerTarget == ""))
	}
	for n := range pl.spec.Servers {
		out = append(out, helperVolume{name: socketVolumeName(pl.spec.ID, n)}.mount(serverSocketDir(n), true))
	}
	return append(append(out, pl.user.mounts(pl.pic)...), p.egressMount()...)
}

// egressMount returns the mount with the socket of the egress proxy, or none if the sandbox has no egress.
func (p *Provider) egressMount() []mount.Mount {
	switch sockets := p.cfg.EgressSockets; {
	case sockets == "":
		return nil
	case filepath.IsAbs(sockets):
		return []mount.Mount{{Type: mount.TypeBind, Source: sockets, Target: egressDir, ReadOnly: true}}
	default:
		return []mount.Mount{helperVolume{name: sockets}.mount(egressDir, true)}
	}
}
