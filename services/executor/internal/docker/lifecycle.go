package docker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Attach returns the sandbox with an id whose container runs or is paused, or sandbox.ErrNotFound if there is none.
func (p *Provider) Attach(ctx context.Context, id string) (sandbox.Sandbox, error) {
	c, err := p.findSandbox(ctx, id)
	if err != nil {
		return nil, err
	}
	if !c.isAlive() {
		return nil, fmt.Errorf("sandbox %s: its runner is gone: %w", id, sandbox.ErrNotFound)
	}
	return &box{p: p, id: c.id, container: c.container, secret: c.secret, kept: true}, nil
}

// List returns every sandbox of the engine that has a container.
func (p *Provider) List(ctx context.Context) ([]sandbox.Info, error) {
	list, err := p.listSandboxes(ctx, "")
	if err != nil {
		return nil, err
	}
	out := make([]sandbox.Info, len(list))
	for i, c := range list {
		out[i] = sandbox.Info{ID: c.id, Labels: c.labels, Created: c.created, Running: c.isAlive(), Paused: c.state == container.StatePaused}
	}
	return out, nil
}

// Terminate ends a sandbox and removes its container. If wipe is false, the sandbox's volumes stay, so that a sandbox whose Spec.Workspace
// names this one can take them over. If wipe is true, the volumes are removed, unless another container uses them.
func (p *Provider) Terminate(ctx context.Context, id string, wipe bool) error {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return fmt.Errorf("terminate sandbox: %w", err)
	}
	c, err := p.findSandbox(ctx, id)
	known := err == nil
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if !known {
		if c.owner, err = p.volumesOwner(ctx, id); err != nil {
			return fmt.Errorf("terminate sandbox %s: %w", id, err)
		}
	}
	if known && !wipe {
		if err := p.recordVolumesOwner(ctx, id, c.owner); err != nil { // first, so that the volumes are found if a later step fails
			return fmt.Errorf("terminate sandbox %s: %w", id, err)
		}
		p.stopRunner(ctx, c)
	}
	// The servers are removed before the sandbox, through which they are found if this fails.
	if err := p.removeServers(ctx, id); err != nil {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	if known {
		if err := p.removeContainer(ctx, c.container); err != nil {
			return fmt.Errorf("terminate sandbox %s: %w", id, err)
		}
	}
	if err := p.removeServerVolumes(ctx, id); err != nil { // the sandbox used them
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	if !wipe {
		return nil
	}
	if err := p.removeSandboxVolumes(ctx, id, c.owner); err != nil {
		return fmt.Errorf("terminate sandbox %s: %w", id, err)
	}
	return nil
}

// removeSandboxVolumes removes the volumes of a sandbox, and the empty volumes that record their owner.
func (p *Provider) removeSandboxVolumes(ctx context.Context, id, owner string) error {
	for _, v := range []string{workspaceVolumeName(owner), stateVolumeName(owner), noteVolumeName(id), noteVolumeName(owner)} {
		if _, err := p.removeVolume(ctx, v); err != nil {
			return err
		}
	}
	p.reclaimSpace()
	if labels, err := p.volumeLabels(ctx, workspaceVolumeName(owner)); err != nil || labels != nil {
		return err // another container uses them by now
	}
	// Notes of sandboxes in between: if a sandbox was ended by its turn and by the sweep at the same time, its note may
	// have been written again after the next sandbox had removed it.
	list, _, err := p.engineVolumes(ctx)
	for _, v := range list {
		if v.Labels[labelRole] == roleNote && v.Labels[labelVolumesOwner] == owner {
			_, gone := p.removeVolume(ctx, v.Name)
			err = errors.Join(err, gone)
		}
	}
	return errors.Join(err, p.releaseUsers(ctx, owner))
}

// stopRunner makes the runner of a running sandbox end its agents, and waits a short time. Processes that have not ended by then are killed
// with the container.
func (p *Provider) stopRunner(ctx context.Context, c listedSandbox) {
	if c.state != container.StateRunning {
		return
	}
	seconds := int(shutdownTimeout / time.Second)
	if err := p.callEngineNoResult(ctx, "stop the container", func(ctx context.Context) error {
		return p.api.ContainerStop(ctx, c.container, container.StopOptions{Timeout: &seconds})
	}); err != nil {
		p.cfg.Logger.Debug("a sandbox does not stop, it will be killed", "sandbox", c.id, "error", err)
	}
}

// removeContainer kills and removes a container, and blocks until it no longer exists.
func (p *Provider) removeContainer(ctx context.Context, containerID string) error {
	ctx, cancel := context.WithTimeout(ctx, p.within)
	defer cancel()
	tick := time.NewTicker(enginePollInterval)
	defer tick.Stop()
	for {
		err := p.callEngineNoResult(ctx, "remove the container", func(ctx context.Context) error {
			return p.api.ContainerRemove(ctx, containerID, container.RemoveOptions{Force: true, RemoveVolumes: true})
		})
		if err == nil || errdefs.IsNotFound(err) {
			return nil
		}
		if !errdefs.IsConflict(err) { // another program is removing it
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// Pause freezes every process of a sandbox, then those of its MCP servers.
func (p *Provider) Pause(ctx context.Context, id string) error {
	if err := p.changeContainerState(ctx, id, container.StateRunning, container.StatePaused, "pause", p.api.ContainerPause); err != nil {
		return err
	}
	return p.freezeServers(ctx, id, container.StateRunning, "pause", p.api.ContainerPause)
}

// Resume continues the MCP servers of a paused sandbox, then the sandbox.
func (p *Provider) Resume(ctx context.Context, id string) error {
	if err := p.freezeServers(ctx, id, container.StatePaused, "resume", p.api.ContainerUnpause); err != nil {
		return err
	}
	return p.changeContainerState(ctx, id, container.StatePaused, container.StateRunning, "resume", p.api.ContainerUnpause)
}

// changeContainerState calls f, which pauses or resumes a container, for the container of a sandbox that is in the state from. It returns
// nil if the container is already in the state to.
func (p *Provider) changeContainerState(ctx context.Context, id string, from, to container.ContainerState, what string, f func(context.Context, string) error) error {
	c, err := p.findSandbox(ctx, id)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	case c.state == to:
		return nil
	case c.state != from:
		return fmt.Errorf("%s sandbox %s: it does not run: %w", what, id, sandbox.ErrNotFound)
	}
	err = p.callEngineNoResult(ctx, what+" sandbox "+id, func(ctx context.Context) error { return f(ctx, c.container) })
	if err == nil {
		return nil
	}
	if now, ferr := p.findSandbox(ctx, id); ferr == nil && now.state == to {
		return nil // another program was faster
	}
	return err
}

// Adopt replaces the labels of a sandbox of the warm pool by those of the session that takes it. Docker cannot change the labels of a
// container, so Adopt writes them into the container's name.
func (p *Provider) Adopt(ctx context.Context, id string, l sandbox.Labels) error {
	if err := p.checkLabels(l); err != nil {
		return fmt.Errorf("adopt sandbox %s: %w", id, err)
	}
	c, err := p.findSandbox(ctx, id)
	if err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	to := adoptedName(id, l)
	if c.name == to {
		return nil
	}
	return p.callEngineNoResult(ctx, "adopt sandbox "+id, func(ctx context.Context) error { return p.api.ContainerRename(ctx, c.container, to) })
}

// State is the state of the container of a sandbox.
type State struct {
	Running   bool // paused or not
	Paused    bool
	OOMKilled bool // in the last run, the engine saw the memory limit kill a process
	ExitCode  int  // exit code of the runner, if it does not run
}

// State returns the state of a sandbox; sandbox.ErrNotFound if there is none.
func (p *Provider) State(ctx context.Context, id string) (State, error) {
	c, err := p.findSandbox(ctx, id)
	if err != nil {
		return State{}, err
	}
	got, err := callEngine(ctx, p, "look at sandbox "+id, func(ctx context.Context) (container.InspectResponse, error) {
		return p.api.ContainerInspect(ctx, c.container)
	})
	if errdefs.IsNotFound(err) {
		return State{}, fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if err != nil {
		return State{}, err
	}
	s := got.State
	return State{Running: s.Running, Paused: s.Paused, OOMKilled: s.OOMKilled, ExitCode: s.ExitCode}, nil
}

// outputTail returns the end of a container's output.
func (p *Provider) outputTail(ctx context.Context, containerID string) string {
	var text bytes.Buffer
	err := p.callEngineNoResult(ctx, "read the runner's log", func(ctx context.Context) error {
		stream, err := p.api.ContainerLogs(ctx, containerID, container.LogsOptions{ShowStdout: true, ShowStderr: true, Tail: "5"})
		if err != nil {
			return err
		}
		_, err = stdcopy.StdCopy(&text, &text, stream)
		return errors.Join(err, stream.Close())
	})
	if err != nil {
		return err.Error()
	}
	raw := text.Bytes()
	return strings.ToValidUTF8(strings.TrimSpace(string(raw[max(0, len(raw)-1024):])), "\uFFFD")
}
