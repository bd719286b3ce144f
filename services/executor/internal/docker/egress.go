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

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// EgressConfig is of the egress proxy that a provider keeps on its engine.
type EgressConfig struct {
	// Image has the egress program as its entrypoint. It is required.
	Image   string
	Network string // the container's, by which the proxy reaches the world; "" for bridge
	// Env are the proxy's settings, models' keys among them, by their variables' names.
	Env map[string]string
}

// EgressProxy is the egress proxy of an engine, which runs there as a container:
// one for each engine, whoever made it. It outlives executors; nobody removes it
// or its two volumes but people. Several may stand for the same container at
// once. It is safe for concurrent use.
type EgressProxy struct {
	p      *Provider
	cfg    EgressConfig
	within time.Duration // until it is ready

	runs singleflight.Group
	mu   sync.Mutex
	at   *egressAt // nil while it is not known to run
	told string    // the container whose other settings were told
}

// egressAt is the container.
type egressAt struct {
	id         string
	entrypoint []string // what is called with health and dial
}

const (
	roleEgress = "egress"
	// labelEgress is what a volume of the proxy's is for. These have no role: no sweep takes them.
	labelEgress = "dev.spool.egress"
)

// In the proxy's container. Its user is not that of sandboxes: the kernel counts
// what a user has open together for all containers.
const (
	egressUser      = 10002
	egressSandboxes = "/spool/sandboxes"
	egressAdmin     = "/spool/admin"
	egressData      = "/spool/data"
	// egressMemory is for the proxy and one small process for each connection of an executor, in bytes.
	egressMemory = 1 << 30
	egressPIDs   = 4096
	// egressDrain is the time of open requests when the container is stopped, egressStop that of the container, in seconds.
	egressDrain = 20
	egressStop  = 30
)

const (
	// egressWithin bounds how long the proxy may take to be ready.
	egressWithin = time.Minute
	// egressCrashes is how often it may end meanwhile.
	egressCrashes = 3
)

// EgressVolume is the name of the volume with the socket for sandboxes, for Config.EgressSockets.
func EgressVolume(engine string) string { return prefix + "egress-" + engine }

func egressDataVolume(engine string) string { return EgressVolume(engine) + "-data" }

// NewEgressProxy gives the proxy of a provider's engine. It asks nothing of the engine yet.
func NewEgressProxy(p *Provider, cfg EgressConfig) (*EgressProxy, error) {
	if cfg.Image == "" {
		return nil, errors.New("egress proxy: Image is required")
	}
	if cfg.Network == "" {
		cfg.Network = "bridge"
	}
	env := maps.Clone(cfg.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, map[string]string{
		"SPOOL_EGRESS_LISTEN_SANDBOXES": egressSandboxes + "/egress.sock", "SPOOL_EGRESS_LISTEN_ADMIN": egressAdmin + "/egress.sock",
		"SPOOL_EGRESS_DATA": egressData, "SPOOL_EGRESS_DRAIN": (egressDrain * time.Second).String(), "GOMEMLIMIT": "768MiB",
	})
	cfg.Env = env
	return &EgressProxy{p: p, cfg: cfg, within: egressWithin}, nil
}

// Name is the container's.
func (e *EgressProxy) Name() string { return EgressVolume(e.p.cfg.Engine) }

// Ensure makes sure that the proxy runs and is well. It makes and starts the
// container if need be; one that is there stays as it is, and what differs from
// the config is logged. An engine that does not answer gives a *sandbox.Error
// with sandbox.CodeEngineUnavailable.
func (e *EgressProxy) Ensure(ctx context.Context) error {
	_, err := e.ensured(ctx)
	return err
}

// ensured gives the container. Those who want it at once share the work, which
// goes on for the others when one of them gives up.
func (e *EgressProxy) ensured(ctx context.Context) (*egressAt, error) {
	e.mu.Lock()
	at := e.at
	e.mu.Unlock()
	if at != nil {
		return at, nil
	}
	done := e.runs.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullWithin+e.within)
		defer cancel()
		at, err := e.ensure(ctx)
		if err != nil {
			return nil, fmt.Errorf("egress proxy %s: %w", e.Name(), err)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.at = at
		return at, nil
	})
	select {
	case r := <-done:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*egressAt), nil //nolint:forcetypeassert // it is what is put in
	case <-ctx.Done():
		return nil, fmt.Errorf("egress proxy %s: %w", e.Name(), ctx.Err())
	}
}

// forget lets the container be looked for again.
func (e *EgressProxy) forget(at *egressAt) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.at == at {
		e.at = nil
	}
}

// ensure finds the container or makes it. Its name is the lock: of those who make it at once, one does.
func (e *EgressProxy) ensure(ctx context.Context) (*egressAt, error) {
	var err error
	for range attempts {
		var id string
		if id, err = e.find(ctx); err == nil {
			var at *egressAt
			if at, err = e.once(ctx, id); err == nil {
				return at, nil
			}
		}
		if !errors.Is(err, errVanished) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(look):
		}
	}
	return nil, guest.WithCode(sandbox.CodeSandboxFailed, "it can be neither found nor made: if a container of that name is not Spool's, rename it", err)
}

// once brings the container of that id to run, or makes one if there is no id.
func (e *EgressProxy) once(ctx context.Context, id string) (*egressAt, error) {
	made := id == ""
	if made {
		var err error
		if id, err = e.make(ctx); err != nil {
			return nil, err
		}
	}
	at, err := e.start(ctx, id, !made)
	if made && err != nil && !guest.IsUnavailable(err) && !errors.Is(err, errVanished) && ctx.Err() == nil {
		// Nobody had any use of it, and the next one may have better settings.
		if rerr := e.p.remove(ctx, id); rerr != nil {
			e.p.cfg.Logger.Warn("an egress proxy that does not work could not be removed", "container", e.Name(), "error", rerr)
		}
	}
	return at, err
}

// find gives the container's id, "" if there is none.
func (e *EgressProxy) find(ctx context.Context) (string, error) {
	list, err := call(ctx, e.p, "look for the container", func(ctx context.Context) ([]container.Summary, error) {
		return e.p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(
			filters.Arg("label", labelRole+"="+roleEgress), filters.Arg("label", labelEngine+"="+e.p.cfg.Engine))})
	})
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0].ID, nil
}

// make makes the container, with what it needs.
func (e *EgressProxy) make(ctx context.Context) (string, error) {
	if _, err := e.p.lookUp(ctx, e.cfg.Image, true); err != nil {
		return "", err
	}
	if err := e.volumes(ctx); err != nil {
		return "", err
	}
	config, host := e.profile()
	made, err := call(ctx, e.p, "make the container", func(ctx context.Context) (container.CreateResponse, error) {
		return e.p.api.ContainerCreate(ctx, config, host, nil, nil, e.Name())
	})
	if errdefs.IsConflict(err) {
		return "", fmt.Errorf("another executor makes it: %w: %w", errVanished, err) // it is found the next time
	}
	if err != nil {
		return "", err
	}
	e.p.cfg.Logger.Info("made the engine's egress proxy", "container", e.Name(), "image", e.cfg.Image, "network", e.cfg.Network)
	return made.ID, nil
}

// volumes makes the sockets' folder and the data's, the proxy's own. To do so twice changes nothing.
func (e *EgressProxy) volumes(ctx context.Context) error {
	sockets, data := EgressVolume(e.p.cfg.Engine), egressDataVolume(e.p.cfg.Engine)
	for name, what := range map[string]string{sockets: "sockets", data: "data"} {
		if err := e.p.makeVolume(ctx, name, map[string]string{labelVersion: layoutVersion, labelEngine: e.p.cfg.Engine, labelEgress: what}); err != nil {
			return err
		}
	}
	helper, err := e.p.helper(ctx, "", e.cfg.Image, volumeAt{sockets, "sockets"}, volumeAt{data, "data"})
	if err != nil {
		return fmt.Errorf("prepare its volumes: %w", err)
	}
	defer e.p.discard(ctx, helper)
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
	return e.p.do(ctx, "prepare its volumes", func(ctx context.Context) error {
		return e.p.api.CopyToContainer(ctx, helper, "/", &archive, container.CopyToContainerOptions{})
	})
}

// profile is the container.
func (e *EgressProxy) profile() (*container.Config, *container.HostConfig) {
	pids, stop := int64(egressPIDs), egressStop
	var env []string
	for _, k := range slices.Sorted(maps.Keys(e.cfg.Env)) {
		env = append(env, k+"="+e.cfg.Env[k])
	}
	config := &container.Config{
		Image: e.cfg.Image, Cmd: []string{"serve"}, WorkingDir: "/", User: fmt.Sprintf("%d:%d", egressUser, egressUser), Env: env, StopSignal: "SIGTERM", StopTimeout: &stop,
		Labels: map[string]string{labelVersion: layoutVersion, labelRole: roleEgress, labelEngine: e.p.cfg.Engine},
	}
	host := &container.HostConfig{
		NetworkMode: container.NetworkMode(e.cfg.Network), IpcMode: container.IPCModePrivate,
		CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"}, ReadonlyRootfs: true,
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyUnlessStopped},
		LogConfig:     container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "10m", "max-file": "5"}},
		Tmpfs:         map[string]string{egressAdmin: fmt.Sprintf("rw,noexec,nosuid,nodev,size=%d,mode=0700,uid=%d,gid=%d", runSize, egressUser, egressUser)},
		Mounts: []mount.Mount{
			volumeAt{name: EgressVolume(e.p.cfg.Engine)}.mount(egressSandboxes, false),
			volumeAt{name: egressDataVolume(e.p.cfg.Engine)}.mount(egressData, false),
		},
		Resources: container.Resources{Memory: egressMemory, MemorySwap: egressMemory, PidsLimit: &pids},
	}
	return config, host
}

// start starts the container unless it runs, and waits until the proxy is well.
func (e *EgressProxy) start(ctx context.Context, id string, found bool) (*egressAt, error) {
	got, err := e.inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	at := &egressAt{id: id, entrypoint: got.Config.Entrypoint}
	switch {
	case len(at.entrypoint) == 0:
		return nil, guest.WithCode(sandbox.CodeImageUnsupported, fmt.Sprintf("image %q has no entrypoint: use one whose entrypoint is the egress program", got.Config.Image), nil)
	case got.State.Paused:
		return nil, errors.New("somebody paused it: docker unpause " + e.Name())
	case got.State.Dead || got.State.Status == container.StateRemoving:
		return nil, fmt.Errorf("the container: %w", errVanished)
	}
	if found {
		if err := e.compare(ctx, got); err != nil {
			return nil, err
		}
	}
	if !got.State.Running { // one that restarts counts as running
		err := e.p.start(ctx, id)
		if errdefs.IsNotFound(err) { // the container, or its network
			if _, gone := e.inspect(ctx, id); gone != nil {
				return nil, gone
			}
		}
		if err != nil {
			return nil, fmt.Errorf("in network %s: %w", got.HostConfig.NetworkMode, err)
		}
	}
	return at, e.ready(ctx, at, got.RestartCount)
}

func (e *EgressProxy) inspect(ctx context.Context, id string) (container.InspectResponse, error) {
	got, err := call(ctx, e.p, "look at the container", func(ctx context.Context) (container.InspectResponse, error) { return e.p.api.ContainerInspect(ctx, id) })
	if errdefs.IsNotFound(err) {
		err = fmt.Errorf("the container: %w: %w", errVanished, err)
	}
	return got, err
}

// compare tells what of a container is not as this executor would have made it.
// Only names are told: values are secret.
func (e *EgressProxy) compare(ctx context.Context, got container.InspectResponse) error {
	other, err := e.otherImage(ctx, got)
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
	told := e.told == got.ID
	e.told = got.ID
	e.mu.Unlock()
	if len(differs) > 0 && !told {
		e.p.cfg.Logger.Warn("the engine's egress proxy was made with other settings than this executor's, and stays as it is, since sandboxes use it: give executors of an engine the same settings, "+
			"and to replace it, when no execution runs, do `docker stop "+e.Name()+" && docker rm -f "+e.Name()+"` there; the executors make it again",
			"container", e.Name(), "differs", differs)
	}
	return nil
}

// otherImage tells whether a container was made from another image than the
// config's is by now. One that is no longer on the engine is known by its name.
func (e *EgressProxy) otherImage(ctx context.Context, got container.InspectResponse) (bool, error) {
	img, err := call(ctx, e.p, "look up image "+e.cfg.Image, func(ctx context.Context) (image.InspectResponse, error) {
		return e.p.api.ImageInspect(ctx, e.cfg.Image)
	})
	if errdefs.IsNotFound(err) || errdefs.IsInvalidArgument(err) {
		return got.Config.Image != e.cfg.Image, nil
	}
	return img.ID != got.Image, err
}

// ready waits until the proxy says that it is well.
func (e *EgressProxy) ready(ctx context.Context, at *egressAt, restarts int) error {
	bounded, cancel := context.WithTimeout(ctx, e.within)
	defer cancel()
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		out, asked := e.ask(bounded, at, "health")
		if asked == nil && out.Code == 0 {
			return nil
		}
		if guest.IsUnavailable(asked) {
			return asked
		}
		now, err := e.inspect(ctx, at.id)
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
			if now.RestartCount-restarts < egressCrashes {
				continue
			}
		case <-bounded.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		said := strings.TrimSpace(out.Stdout + out.Stderr)
		if asked != nil {
			said = asked.Error()
		}
		return fmt.Errorf("it does not get ready; its log ends with: %s; and its health check with: %s", e.p.lastWords(ctx, at.id), said)
	}
}

// ask runs a command of the egress program to its end.
func (e *EgressProxy) ask(ctx context.Context, at *egressAt, args ...string) (guest.Answer, error) {
	proc, err := e.exec(ctx, at, args...)
	if err != nil {
		return guest.Answer{}, err
	}
	defer context.AfterFunc(ctx, proc.Abandon)()
	_ = proc.Stdin().Close() // a command that ended early has closed it
	var errs []byte
	said := make(chan struct{})
	go func() {
		defer close(said)
		errs, _ = io.ReadAll(proc.Stderr()) // cut off with stdout, whose error counts
	}()
	out, err := io.ReadAll(proc.Stdout())
	<-said
	if ctx.Err() != nil {
		return guest.Answer{}, ctx.Err()
	}
	code, werr := proc.Wait()
	return guest.Answer{Stdout: string(out), Stderr: string(errs), Code: code}, errors.Join(err, werr)
}

// exec starts a command of the egress program.
func (e *EgressProxy) exec(ctx context.Context, at *egressAt, args ...string) (*process, error) {
	b := &box{p: e.p, id: e.Name(), container: at.id}
	return b.start(ctx, container.ExecOptions{WorkingDir: "/", Cmd: append(slices.Clone(at.entrypoint), args...)}, "")
}
