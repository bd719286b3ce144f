package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"golang.org/x/sync/singleflight"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// EgressConfig configures the egress proxy on a provider's engine.
type EgressConfig struct {
	// Image is an image whose entrypoint is the egress program. It is required.
	Image   string
	Network string // of the container, with access to the internet; required
	// Env has the proxy's settings by their variables, including the keys of models.
	Env map[string]string
}

// EgressProxy manages the egress proxy of an engine: one container, which all executors of the engine share and which outlives
// them. Spool never removes the container or its two volumes; an operator does. Several EgressProxy values, also in different
// executors, may manage the same container. It is safe for concurrent use.
type EgressProxy struct {
	p      *Provider
	cfg    EgressConfig
	within time.Duration // limit of the time until the proxy is ready

	runs    singleflight.Group
	mu      sync.Mutex
	running *egressContainer // nil while the container is not known to run
	warned  string           // id of the container whose different settings were logged
}

// egressContainer has the id and the entrypoint of the running container of the egress proxy.
type egressContainer struct {
	id         string
	entrypoint []string // the egress program, for its commands health and dial
}

const (
	roleEgress = "egress"
	// labelEgress is the label of the egress proxy's volumes; its value is the purpose of the volume. The volumes have
	// no role label, so no sweep removes them.
	labelEgress = "dev.spool.egress"
)

// Paths and limits in the proxy's container. Its user differs from that of sandboxes, because the kernel counts the resources of a
// user over all containers.
const (
	egressUser         = 10002
	egressSandboxesDir = "/spool/sandboxes"
	egressAdminDir     = "/spool/admin"
	egressDataDir      = "/spool/data"
	// egressMemoryBytes is the memory limit in bytes of the container of the egress proxy. Each connection of an executor
	// needs a small process in the container.
	egressMemoryBytes = 1 << 30
	egressPIDs        = 4096
	// egressDrainSeconds is the time for which open requests may continue when the egress proxy's container is stopped. After
	// egressStopSeconds the engine kills the container.
	egressDrainSeconds = 20
	egressStopSeconds  = 30
)

const (
	// egressReadyTimeout is the maximum time that the egress proxy may take to become ready.
	egressReadyTimeout = time.Minute
	// maxEgressCrashes is the number of exits of the egress proxy within egressReadyTimeout after which its start has failed.
	maxEgressCrashes = 3
)

// EgressVolume returns the name of the volume with the socket at which sandboxes of an engine reach the egress proxy, for
// Config.EgressSockets.
func EgressVolume(engine string) string { return namePrefix + "egress-" + engine }

// egressDataVolume returns the name of the volume with the data of an engine's egress proxy.
func egressDataVolume(engine string) string { return EgressVolume(engine) + "-data" }

// NewEgressProxy returns an EgressProxy for the engine of a provider. It sends no request to the engine.
func NewEgressProxy(p *Provider, cfg EgressConfig) (*EgressProxy, error) {
	if cfg.Image == "" || cfg.Network == "" {
		return nil, errors.New("egress proxy: Image and Network are required")
	}
	env := maps.Clone(cfg.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, map[string]string{
		"SPOOL_EGRESS_LISTEN_SANDBOXES": egressSandboxesDir + "/egress.sock", "SPOOL_EGRESS_LISTEN_ADMIN": egressAdminDir + "/egress.sock",
		"SPOOL_EGRESS_DATA": egressDataDir, "SPOOL_EGRESS_DRAIN": (egressDrainSeconds * time.Second).String(), "GOMEMLIMIT": "768MiB",
	})
	cfg.Env = env
	return &EgressProxy{p: p, cfg: cfg, within: egressReadyTimeout}, nil
}

// ContainerName returns the name of the egress proxy's container.
func (e *EgressProxy) ContainerName() string { return EgressVolume(e.p.cfg.Engine) }

// EnsureRunning blocks until the egress proxy runs and is healthy. It creates and starts the proxy's container if necessary. It does not
// change an existing container, but logs which of the container's settings differ from the config. If the engine does not answer, the error
// is a *sandbox.Error with CodeEngineUnavailable.
func (e *EgressProxy) EnsureRunning(ctx context.Context) error {
	_, err := e.ensureShared(ctx)
	return err
}

// ensureShared returns the running container of the egress proxy, which it creates or starts if necessary. Concurrent calls share the work,
// which continues when one of the calls is cancelled.
func (e *EgressProxy) ensureShared(ctx context.Context) (*egressContainer, error) {
	e.mu.Lock()
	c := e.running
	e.mu.Unlock()
	if c != nil {
		return c, nil
	}
	done := e.runs.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullTimeout+e.within)
		defer cancel()
		c, err := e.ensureRunning(ctx)
		if err != nil {
			return nil, fmt.Errorf("egress proxy %s: %w", e.ContainerName(), err)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.running = c
		return c, nil
	})
	select {
	case r := <-done:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*egressContainer), nil //nolint:forcetypeassert // the function above returns it
	case <-ctx.Done():
		return nil, fmt.Errorf("egress proxy %s: %w", e.ContainerName(), ctx.Err())
	}
}

// forgetContainer makes the next call of ensureShared look for the egress proxy's container again, if c is the container that was found
// last.
func (e *EgressProxy) forgetContainer(c *egressContainer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.running == c {
		e.running = nil
	}
}

// ensureRunning finds or creates the egress proxy's container. The container's name is the lock: only one of several concurrent creations
// succeeds.
func (e *EgressProxy) ensureRunning(ctx context.Context) (*egressContainer, error) {
	var err error
	for range maxCreateAttempts {
		var id string
		if id, err = e.findContainer(ctx); err == nil {
			var c *egressContainer
			if c, err = e.ensureOnce(ctx, id); err == nil {
				return c, nil
			}
		}
		if !errors.Is(err, errVanished) {
			return nil, err
		}
		if retry.Pause(ctx, enginePollInterval) != nil {
			return nil, ctx.Err()
		}
	}
	return nil, guest.WithCode(sandbox.CodeSandboxFailed, "it can neither be found nor created: if a container of that name is not Spool's, rename it", err)
}

// ensureOnce starts the egress proxy's container with an id, or creates a container if the id is "".
func (e *EgressProxy) ensureOnce(ctx context.Context, id string) (*egressContainer, error) {
	create := id == ""
	if create {
		var err error
		if id, err = e.createContainer(ctx); err != nil {
			return nil, err
		}
	}
	c, err := e.startContainer(ctx, id, !create)
	if create && err != nil && !guest.IsUnavailable(err) && !errors.Is(err, errVanished) && ctx.Err() == nil {
		// No sandbox uses it, and the next executor may have working settings.
		if rerr := e.p.removeContainer(ctx, id); rerr != nil {
			e.p.cfg.Logger.Warn("remove an egress proxy that does not work", "container", e.ContainerName(), "error", rerr)
		}
	}
	return c, err
}

// findContainer returns the id of the egress proxy's container, or "" if there is none.
func (e *EgressProxy) findContainer(ctx context.Context) (string, error) {
	list, err := callEngine(ctx, e.p, "look for the container", func(ctx context.Context) ([]container.Summary, error) {
		return e.p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(
			filters.Arg("label", labelRole+"="+roleEgress), filters.Arg("label", labelEngine+"="+e.p.cfg.Engine))})
	})
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0].ID, nil
}

// createContainer creates the egress proxy's container and its volumes, and returns the container's id.
func (e *EgressProxy) createContainer(ctx context.Context) (string, error) {
	if _, err := e.p.lookUpImage(ctx, e.cfg.Image, true); err != nil {
		return "", err
	}
	if err := e.createVolumes(ctx); err != nil {
		return "", err
	}
	config, host := e.containerConfig()
	made, err := callEngine(ctx, e.p, "make the container", func(ctx context.Context) (container.CreateResponse, error) {
		return e.p.api.ContainerCreate(ctx, config, host, nil, nil, e.ContainerName())
	})
	if errdefs.IsConflict(err) {
		return "", fmt.Errorf("another executor creates it: %w: %w", errVanished, err) // ensure finds it in its next attempt
	}
	if err != nil {
		return "", err
	}
	e.p.cfg.Logger.Info("created the engine's egress proxy", "container", e.ContainerName(), "image", e.cfg.Image, "network", e.cfg.Network)
	return made.ID, nil
}

// createVolumes creates the egress proxy's volumes for sockets and data, and makes the proxy's user their owner. It is idempotent.
func (e *EgressProxy) createVolumes(ctx context.Context) error {
	sockets, data := EgressVolume(e.p.cfg.Engine), egressDataVolume(e.p.cfg.Engine)
	for name, purpose := range map[string]string{sockets: "sockets", data: "data"} {
		if err := e.p.createVolume(ctx, name, map[string]string{labelVersion: labelsVersion, labelEngine: e.p.cfg.Engine, labelEgress: purpose}); err != nil {
			return err
		}
	}
	helper, err := e.p.createHelper(ctx, "", e.cfg.Image, helperVolume{sockets, "sockets"}, helperVolume{data, "data"})
	if err != nil {
		return fmt.Errorf("prepare its volumes: %w", err)
	}
	defer e.p.discardHelper(ctx, helper)
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	for _, dir := range []tar.Header{{Name: "v/sockets/", Mode: 0o755}, {Name: "v/data/", Mode: 0o700}} {
		dir.Typeflag, dir.Uid, dir.Gid, dir.ModTime = tar.TypeDir, egressUser, egressUser, time.Now()
		if err := out.WriteHeader(&dir); err != nil {
			return fmt.Errorf("prepare its volumes: %w", err)
		}
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("prepare its volumes: %w", err)
	}
	return e.p.callEngineNoResult(ctx, "prepare its volumes", func(ctx context.Context) error {
		return e.p.api.CopyToContainer(ctx, helper, "/", &archive, container.CopyToContainerOptions{})
	})
}

// containerConfig returns the configuration of the egress proxy's container.
func (e *EgressProxy) containerConfig() (*container.Config, *container.HostConfig) {
	pids, stop := int64(egressPIDs), egressStopSeconds
	var env []string
	for _, k := range slices.Sorted(maps.Keys(e.cfg.Env)) {
		env = append(env, k+"="+e.cfg.Env[k])
	}
	config := &container.Config{
		Image: e.cfg.Image, Cmd: []string{"serve"}, WorkingDir: "/", User: fmt.Sprintf("%d:%d", egressUser, egressUser), Env: env, StopSignal: "SIGTERM", StopTimeout: &stop,
		Labels: map[string]string{labelVersion: labelsVersion, labelRole: roleEgress, labelEngine: e.p.cfg.Engine},
	}
	host := &container.HostConfig{
		NetworkMode: container.NetworkMode(e.cfg.Network), IpcMode: container.IPCModePrivate,
		CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"}, ReadonlyRootfs: true,
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyUnlessStopped},
		LogConfig:     container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "10m", "max-file": "5"}},
		Tmpfs:         map[string]string{egressAdminDir: fmt.Sprintf("rw,noexec,nosuid,nodev,size=%d,mode=0700,uid=%d,gid=%d", runFolderBytes, egressUser, egressUser)},
		Mounts: []mount.Mount{
			helperVolume{name: EgressVolume(e.p.cfg.Engine)}.mount(egressSandboxesDir, false),
			helperVolume{name: egressDataVolume(e.p.cfg.Engine)}.mount(egressDataDir, false),
		},
		Resources: container.Resources{Memory: egressMemoryBytes, MemorySwap: egressMemoryBytes, PidsLimit: &pids},
	}
	return config, host
}

// startContainer starts the egress proxy's container unless it runs, and blocks until the proxy is healthy. found is true for a container
// that existed before.
func (e *EgressProxy) startContainer(ctx context.Context, id string, found bool) (*egressContainer, error) {
	got, err := e.inspectContainer(ctx, id)
	if err != nil {
		return nil, err
	}
	c := &egressContainer{id: id, entrypoint: got.Config.Entrypoint}
	switch {
	case len(c.entrypoint) == 0:
		return nil, guest.WithCode(sandbox.CodeImageUnsupported, fmt.Sprintf("image %q has no entrypoint: use one whose entrypoint is the egress program", got.Config.Image), nil)
	case got.State.Paused:
		return nil, errors.New("it is paused: run docker unpause " + e.ContainerName())
	case got.State.Dead || got.State.Status == container.StateRemoving:
		return nil, fmt.Errorf("the container: %w", errVanished)
	}
	if found {
		if err := e.logDifferences(ctx, got); err != nil {
			return nil, err
		}
	}
	if !got.State.Running { // a container that restarts counts as running
		err := e.p.startContainer(ctx, id)
		if errdefs.IsNotFound(err) { // the container, or its network
			if _, gone := e.inspectContainer(ctx, id); gone != nil {
				return nil, gone
			}
		}
		if err != nil {
			return nil, fmt.Errorf("in network %s: %w", got.HostConfig.NetworkMode, err)
		}
	}
	return c, e.awaitReady(ctx, c, got.RestartCount)
}

// inspectContainer returns the engine's description of a container. The error wraps errVanished if the container does not exist.
func (e *EgressProxy) inspectContainer(ctx context.Context, id string) (container.InspectResponse, error) {
	got, err := callEngine(ctx, e.p, "look at the container", func(ctx context.Context) (container.InspectResponse, error) { return e.p.api.ContainerInspect(ctx, id) })
	if errdefs.IsNotFound(err) {
		err = fmt.Errorf("the container: %w: %w", errVanished, err)
	}
	return got, err
}

// logDifferences logs the names of the settings in which the running egress proxy container differs from the config, once for each
// container. It does not log the values, which may be secret.
func (e *EgressProxy) logDifferences(ctx context.Context, got container.InspectResponse) error {
	other, err := e.hasOtherImage(ctx, got)
	if err != nil {
		return err
	}
	var differs []string
	if other {
		differs = append(differs, "image")
	}
	if string(got.HostConfig.NetworkMode) != e.cfg.Network {
		differs = append(differs, "network")
	}
	has := map[string]string{}
	for _, v := range got.Config.Env {
		k, v, _ := strings.Cut(v, "=")
		has[k] = v
	}
	for _, k := range slices.Sorted(maps.Keys(e.cfg.Env)) {
		if has[k] != e.cfg.Env[k] {
			differs = append(differs, k)
		}
	}
	e.mu.Lock()
	warned := e.warned == got.ID
	e.warned = got.ID
	e.mu.Unlock()
	if len(differs) > 0 && !warned {
		e.p.cfg.Logger.Warn("the engine's egress proxy was created with other settings than this executor's, and is not changed, since sandboxes use it: give all executors of an engine the same settings; "+
			"to replace the proxy, when no execution runs, run `docker stop "+e.ContainerName()+" && docker rm -f "+e.ContainerName()+"` on the engine's machine; the executors create it again",
			"container", e.ContainerName(), "differs", differs)
	}
	return nil
}

// hasOtherImage reports whether a container was created from another image than the one that the config names now. If that image is
// not on the engine any more, hasOtherImage compares the names.
func (e *EgressProxy) hasOtherImage(ctx context.Context, got container.InspectResponse) (bool, error) {
	img, err := callEngine(ctx, e.p, "look up image "+e.cfg.Image, func(ctx context.Context) (image.InspectResponse, error) {
		return e.p.api.ImageInspect(ctx, e.cfg.Image)
	})
	if errdefs.IsNotFound(err) || errdefs.IsInvalidArgument(err) {
		return got.Config.Image != e.cfg.Image, nil
	}
	return img.ID != got.Image, err
}

// awaitReady blocks until the egress proxy's health check succeeds. It fails early if the container restarts maxEgressCrashes times;
// restarts is the number of its earlier restarts.
func (e *EgressProxy) awaitReady(ctx context.Context, c *egressContainer, restarts int) error {
	bounded, cancel := context.WithTimeout(ctx, e.within)
	defer cancel()
	tick := time.NewTicker(enginePollInterval)
	defer tick.Stop()
	for {
		out, askErr := e.runEgressProgram(bounded, c, "health")
		if askErr == nil && out.Code == 0 {
			return nil
		}
		if guest.IsUnavailable(askErr) {
			return askErr
		}
		now, err := e.inspectContainer(ctx, c.id)
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
			if now.RestartCount-restarts < maxEgressCrashes {
				continue
			}
		case <-bounded.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		said := strings.TrimSpace(out.Stdout + out.Stderr)
		if askErr != nil {
			said = askErr.Error()
		}
		return fmt.Errorf("it does not become ready; its log ends with: %s; its health check printed: %s", e.p.outputTail(ctx, c.id), said)
	}
}

// runEgressProgram runs the egress program in the proxy's container with the arguments args, and returns its output and exit code.
func (e *EgressProxy) runEgressProgram(ctx context.Context, c *egressContainer, args ...string) (guest.RunResult, error) {
	proc, err := e.startEgressProgram(ctx, c, args...)
	if err != nil {
		return guest.RunResult{}, err
	}
	defer context.AfterFunc(ctx, proc.Abandon)()
	_ = proc.Stdin().Close() // a command that ended early has closed it
	var errs []byte
	said := make(chan struct{})
	go func() {
		defer close(said)
		errs, _ = io.ReadAll(proc.Stderr()) // an error ends stdout as well, whose error is returned
	}()
	out, err := io.ReadAll(proc.Stdout())
	<-said
	if ctx.Err() != nil {
		return guest.RunResult{}, ctx.Err()
	}
	code, werr := proc.Wait()
	return guest.RunResult{Stdout: string(out), Stderr: string(errs), Code: code}, errors.Join(err, werr)
}

// startEgressProgram starts the egress program in the proxy's container with the arguments args.
func (e *EgressProxy) startEgressProgram(ctx context.Context, c *egressContainer, args ...string) (*process, error) {
	b := &box{p: e.p, id: e.ContainerName(), container: c.id}
	return b.startExec(ctx, container.ExecOptions{WorkingDir: "/", Cmd: append(slices.Clone(c.entrypoint), args...)}, "")
}
