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
	serversDir     = "/spool/mcp"
	searchPath     = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// runFolderBytes is the size limit in bytes of the folder in memory in which the runner keeps its socket and other
// files of its own.
const runFolderBytes = 1 << 20

// maxAttempts is the maximum number of attempts to create a container. A further attempt is made only after errVanished; every other
// error ends the creation.
const maxAttempts = 20

// errVanished is returned when another executor has changed what this one has just looked up: it has removed a
// container or a volume, or created the same container. The caller may look it up again.
var errVanished = errors.New("it was removed meanwhile")

// Create creates a sandbox and blocks until its runner answers. If there is one with the id, Create returns that one, and starts its
// container if it has ended.
func (p *Provider) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := p.check(spec); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	var err error
	for range maxAttempts {
		var b *box
		var c listedSandbox
		c, err = p.find(ctx, spec.ID)
		if errors.Is(err, sandbox.ErrNotFound) {
			b, err = p.make(ctx, spec)
		} else if err == nil {
			b, err = p.reuse(ctx, c)
		}
		if err == nil {
			return b, nil
		}
		if !errors.Is(err, errVanished) {
			break
		}
		if retry.Pause(ctx, pollInterval) != nil {
			return nil, ctx.Err()
		}
	}
	return nil, guest.WithCode(sandbox.CodeSandboxFailed, "create sandbox "+spec.ID, err)
}

// check returns an error for a Spec that is invalid, or that this provider cannot fulfil.
func (p *Provider) check(spec sandbox.Spec) error {
	err := errors.Join(events.CheckID("sandbox id", events.KindSandbox, spec.ID), p.checkLabels(spec.Labels))
	if spec.Workspace != "" {
		err = errors.Join(err, events.CheckID("workspace", events.KindSandbox, spec.Workspace))
	}
	if spec.Servers < 0 || spec.Servers > maxServers {
		err = errors.Join(err, fmt.Errorf("servers: %d is not between 0 and %d", spec.Servers, maxServers))
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

// plan holds everything that determines the container of a new sandbox.
type plan struct {
	spec   sandbox.Spec
	limits sandbox.Limits
	pic    imageInfo
	runner *runnerBinary
	secret string // the secret with which executors prove themselves to the runner
	owner  string // the sandbox after which the volumes are named
	user   user   // of the processes and the volumes
	kept   bool
}

// make creates a new sandbox and blocks until its runner answers. After an error it has removed what it created. The error wraps errVanished
// if another attempt may succeed.
func (p *Provider) make(ctx context.Context, spec sandbox.Spec) (*box, error) {
	pl, err := p.prepare(ctx, spec)
	if err != nil {
		return nil, err
	}
	if pl.owner != spec.ID {
		if err := p.note(ctx, spec.ID, pl.owner); err != nil {
			return nil, err
		}
	}
	if err := p.createSockets(ctx, spec); err != nil {
		return nil, err
	}
	config, host := p.profile(pl)
	made, err := call(ctx, p, "make the container", func(ctx context.Context) (container.CreateResponse, error) {
		return p.api.ContainerCreate(ctx, config, host, nil, nil, name(spec.ID))
	})
	if errdefs.IsConflict(err) {
		return nil, fmt.Errorf("%w: another executor makes it: %w", errVanished, err) // the next attempt finds it
	}
	err = pl.user.wrapVanished(err)
	if err == nil {
		err = p.checkVolumes(ctx, pl)
	}
	if err == nil {
		err = p.start(ctx, made.ID)
	}
	b := &box{p: p, id: spec.ID, container: made.ID, secret: pl.secret, kept: pl.kept}
	if err == nil {
		err = b.awaitReady(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, p.undo(context.WithoutCancel(ctx), pl, made.ID))
	}
	if spec.Workspace != "" && spec.Workspace != spec.ID {
		// The note of the earlier sandbox, if there is one, is not needed any more.
		if _, err := p.removeVolume(ctx, noteVolume(spec.Workspace)); err != nil {
			p.cfg.Logger.Warn("a note stays until the sweep", "sandbox", spec.Workspace, "error", err)
		}
	}
	return b, nil
}

// prepare creates everything on the engine that the container needs: the image, the volumes and the user. It returns the container's plan.
func (p *Provider) prepare(ctx context.Context, spec sandbox.Spec) (plan, error) {
	pl := plan{spec: spec, owner: spec.ID, secret: runner.NewSecret(), limits: overlay(p.cfg.Limits, spec.Limits)}
	cpus, err := p.processors(ctx)
	if err != nil {
		return pl, err
	}
	pl.limits.CPUs = min(pl.limits.CPUs, float64(cpus))
	ref := spec.Image
	if ref == "" {
		ref = p.cfg.Image
	}
	if pl.pic, err = p.image(ctx, fieldImage, ref); err != nil {
		return pl, err
	}
	if pl.runner, err = p.binary(pl.pic); err != nil {
		return pl, err
	}
	if err := p.fill(ctx, pl.runner, ref); err != nil {
		return pl, err
	}
	if err := p.createSkillsVolume(ctx, ref); err != nil {
		return pl, err
	}
	if spec.Workspace != "" {
		owner, err := p.owner(ctx, spec.Workspace)
		if err != nil {
			return pl, err
		}
		if pl.kept, err = p.volumesExist(ctx, owner); err != nil {
			return pl, err
		}
		if pl.kept {
			pl.owner = owner
			if pl.user, err = p.userOf(ctx, owner); err != nil {
				return pl, err
			}
			return pl, p.prepareVolumes(ctx, pl.pic, pl.user, agentName, homeDir)
		}
	}
	pl.user, err = p.createVolumes(ctx, pl)
	return pl, err
}

// checkVolumes returns an error unless the volumes of the new container are those that were prepared. A sweep may have
// removed a volume before the container used it; the engine then created an empty one in its place. The error then wraps errVanished,
// except for a layer, which the caller cannot create again.
func (p *Provider) checkVolumes(ctx context.Context, pl plan) error {
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
	if err := p.checkUserVolume(ctx, pl.user, p.reservation(pl.owner)); err != nil {
		return err
	}
	there, err := p.volumesExist(ctx, pl.owner)
	if err == nil && !there {
		return fmt.Errorf("workspace of %s: %w", pl.owner, errVanished)
	}
	return err
}

// checkRunnerVolume returns an error that wraps errVanished unless the runner's volume, which a container now uses, is the volume that was
// filled.
func (p *Provider) checkRunnerVolume(ctx context.Context, r *runnerBinary) error {
	l, err := p.volumeLabels(ctx, r.volume())
	if err != nil || l[labelRole] == roleRunner {
		return err
	}
	r.forget()
	return fmt.Errorf("volume %s: %w", r.volume(), errVanished)
}

// undo removes everything that was created for a sandbox whose creation failed. A workspace that was taken over from
// another sandbox stays.
func (p *Provider) undo(ctx context.Context, pl plan, containerID string) error {
	var err error
	if containerID != "" {
		err = p.remove(ctx, containerID)
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
		doomed = append(doomed, socketVolume(pl.spec.ID, n))
	}
	if !pl.kept {
		doomed = append(doomed, workVolume(pl.spec.ID), stateVolume(pl.spec.ID))
	}
	if pl.owner != pl.spec.ID {
		doomed = append(doomed, noteVolume(pl.spec.ID))
	}
	if l, lerr := p.volumeLabels(ctx, pl.runner.volume()); lerr == nil && l[labelRole] != roleRunner {
		doomed = append(doomed, pl.runner.volume()) // empty, created by the engine
	}
	if l, lerr := p.volumeLabels(ctx, userVolume(pl.user.id)); lerr == nil && l[labelRole] != roleUser {
		doomed = append(doomed, userVolume(pl.user.id)) // empty, created by the engine
	}
	for _, v := range doomed {
		_, rerr := p.removeVolume(ctx, v)
		err = errors.Join(err, rerr)
	}
	p.reclaimSpace()
	return errors.Join(err, p.releaseUsers(ctx, pl.owner)) // keeps the user while the workspace exists
}

// reuse returns the sandbox of a container that exists, and starts or resumes the container if necessary.
func (p *Provider) reuse(ctx context.Context, c listedSandbox) (*box, error) {
	b := &box{p: p, id: c.id, container: c.container, secret: c.secret, kept: c.owner != c.id}
	switch c.state {
	case container.StateRunning:
	case container.StatePaused:
		if err := p.Resume(ctx, c.id); err != nil {
			return nil, err
		}
	case container.StateRemoving, container.StateDead:
		if err := p.remove(ctx, c.container); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("container of %s: %w", c.id, errVanished)
	default:
		if err := p.start(ctx, c.container); err != nil {
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

// start starts a container; it returns nil for one that runs. If the container's volumes cannot be mounted, start attaches
// them and tries once more: loop devices do not survive a restart of the machine.
func (p *Provider) start(ctx context.Context, containerID string) error {
	err := p.startOnce(ctx, containerID)
	if err == nil || errdefs.IsNotFound(err) || guest.IsUnavailable(err) || ctx.Err() != nil {
		return err
	}
	attached, aerr := p.reattach(ctx, containerID)
	if aerr != nil || !attached {
		return errors.Join(err, aerr)
	}
	p.cfg.Logger.Info("attached the volumes of a container again", "container", containerID, "reason", err)
	return p.startOnce(ctx, containerID)
}

// startOnce starts a container; it returns nil for one that runs.
func (p *Provider) startOnce(ctx context.Context, containerID string) error {
	return p.do(ctx, "start the container", func(ctx context.Context) error {
		return p.api.ContainerStart(ctx, containerID, container.StartOptions{})
	})
}

// profile returns the configuration of a sandbox's container, hardened.
func (p *Provider) profile(pl plan) (*container.Config, *container.HostConfig) {
	config := &container.Config{
		Image: pl.pic.ref, Entrypoint: []string{runnerPath, "serve"}, WorkingDir: workspaceDir, Hostname: "sandbox",
		User: pl.user.String(), Env: p.environ(pl), StopSignal: "SIGTERM",
		Labels:      labels(pl),
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
	}
	host := p.restrictions(pl.limits)
	host.Tmpfs, host.Mounts = p.tmpfs(pl.pic, pl.user), p.mounts(pl)
	return config, host
}

// restrictions returns the restrictions of every container in which agents or their servers run.
func (p *Provider) restrictions(l sandbox.Limits) *container.HostConfig {
	return &container.HostConfig{
		NetworkMode: "none", IpcMode: container.IPCModePrivate, Runtime: p.cfg.Runtime,
		CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"}, ReadonlyRootfs: true,
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
		LogConfig:     smallLog(),
		Resources: container.Resources{
			Memory: l.MemoryBytes, MemorySwap: l.MemoryBytes, // equal: no swap
			NanoCPUs: int64(l.CPUs * 1e9), PidsLimit: &l.PIDs,
			Ulimits: ulimits(),
		},
	}
}

// ulimits returns the limits that the kernel enforces for each process, or for a user in all containers.
// An engine without the capability SYS_RESOURCE cannot go above its own hard limits, so none is high.
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

// smallLog returns a log configuration that keeps the end of a container's output.
func smallLog() container.LogConfig {
	return container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "1m", "max-file": "1"}}
}

// environ returns the environment of all processes in a sandbox. The image's variables and those of each process are added to it.
func (p *Provider) environ(pl plan) []string {
	path := pl.pic.path
	if path == "" {
		path = searchPath
	}
	if pl.spec.Layer != "" {
		path = strings.Join(append(layer.Path(layerDir), path), ":")
	}
	env := []string{
		"PATH=" + path, "HOME=" + homeDir, "LANG=C.UTF-8",
		"SPOOL_RUNNER_SOCKET=" + runDir + "/runner.sock", "SPOOL_RUNNER_WORKSPACE=" + workspaceDir, "SPOOL_RUNNER_STATE=" + stateDir,
		"SPOOL_RUNNER_DISK_LIMIT=" + strconv.FormatInt(pl.limits.DiskBytes, 10),
	}
	if pl.spec.Layer != "" {
		env = append(env, layer.Environ(layerDir)...)
	}
	if pl.spec.EgressToken != "" {
		env = append(env, "SPOOL_RUNNER_EGRESS_SOCKET="+egressSocket, "SPOOL_RUNNER_EGRESS_TOKEN="+pl.spec.EgressToken)
	}
	return env
}

// shmDir is the folder of shared memory, of the engine's default size.
const shmDir = "/dev/shm"

var shmOptions = "rw,noexec,nosuid,nodev,mode=1777," + tmpfsLimit(64<<20)

// tmpfsLimit returns the mount options of a folder in memory. They limit its size, and its files to one for each page
// of that size.
func tmpfsLimit(bytes int64) string {
	return fmt.Sprintf("size=%d,nr_inodes=%d", bytes, max(bytes/bytesForFile, 64))
}

// tmpfs returns the folders in memory. Volumes that the image declares are among them: on disk, no limit would apply to
// them.
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
	for _, taken := range []string{workspaceDir, workspaceAlias, stateDir, binDir, skillsDir, layerDir, egressDir, serversDir, userDir} {
		delete(out, taken)
	}
	return out
}

// mounts returns the volumes of a sandbox's container, and their places in it.
func (p *Provider) mounts(pl plan) []mount.Mount {
	work := volumeAt{name: workVolume(pl.owner)}
	out := []mount.Mount{
		work.mount(workspaceDir, false), work.mount(workspaceAlias, false),
		volumeAt{name: stateVolume(pl.owner)}.mount(stateDir, false),
		volumeAt{name: pl.runner.volume()}.mount(binDir, true),
		volumeAt{name: SkillsVolume(p.cfg.Engine)}.mount(skillsDir, true),
	}
	if v := cmp.Or(pl.spec.Layer, pl.spec.LayerTarget); v != "" {
		out = append(out, volumeAt{name: v}.mount(layerDir, pl.spec.LayerTarget == ""))
	}
	for n := range pl.spec.Servers {
		out = append(out, volumeAt{name: socketVolume(pl.spec.ID, n)}.mount(serverDir(n), true))
	}
	return append(append(out, pl.user.mounts(pl.pic)...), p.egressMount()...)
}

// egressMount returns the mount with the egress proxy's socket; none if the sandbox has no egress.
func (p *Provider) egressMount() []mount.Mount {
	switch sockets := p.cfg.EgressSockets; {
	case sockets == "":
		return nil
	case filepath.IsAbs(sockets):
		return []mount.Mount{{Type: mount.TypeBind, Source: sockets, Target: egressDir, ReadOnly: true}}
	default:
		return []mount.Mount{volumeAt{name: sockets}.mount(egressDir, true)}
	}
}
