package docker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/api/types/volume"
)

// workspaceVolumeName returns the name of the volume with a sandbox's workspace.
func workspaceVolumeName(id string) string { return namePrefix + id + "-work" }

// stateVolumeName returns the name of the volume with the agent's own records of a sandbox.
func stateVolumeName(id string) string { return namePrefix + id + "-state" }

// noteVolumeName returns the name of the empty volume whose label names the owner of a sandbox's volumes.
func noteVolumeName(id string) string { return namePrefix + id + "-owner" }

// helperVolume is a volume that a helper container mounts below /v, at the path folder.
type helperVolume struct{ name, folder string }

// mount returns the mount of the volume at a path of a container.
func (v helperVolume) mount(target string, readOnly bool) mount.Mount {
	return mount.Mount{Type: mount.TypeVolume, Source: v.name, Target: target, ReadOnly: readOnly, VolumeOptions: &mount.VolumeOptions{NoCopy: true}}
}

// createVolume creates a volume, unless it exists.
func (p *Provider) createVolume(ctx context.Context, name string, labels map[string]string) error {
	return p.callEngineNoResult(ctx, "make volume "+name, func(ctx context.Context) error {
		_, err := p.api.VolumeCreate(ctx, volume.CreateOptions{Name: name, Labels: labels})
		return err
	})
}

// volumeLabels returns the labels of a volume. It returns nil if the volume does not exist, or if the engine created it without labels for
// a container.
func (p *Provider) volumeLabels(ctx context.Context, name string) (map[string]string, error) {
	v, err := callEngine(ctx, p, "look up volume "+name, func(ctx context.Context) (volume.Volume, error) { return p.api.VolumeInspect(ctx, name) })
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	return v.Labels, err
}

// removeVolume removes a volume unless a container uses it, and reports whether the volume was removed.
func (p *Provider) removeVolume(ctx context.Context, name string) (bool, error) {
	err := p.callEngineNoResult(ctx, "remove volume "+name, func(ctx context.Context) error { return p.api.VolumeRemove(ctx, name, false) })
	if errdefs.IsNotFound(err) || errdefs.IsConflict(err) {
		return false, nil
	}
	return err == nil, err
}

// createVolumes creates the volumes of a new sandbox, for its workspace and for its agent's records, and makes a new user their owner,
// which it returns. The user also owns the volume of the dependency layer if the sandbox installs one.
func (p *Provider) createVolumes(ctx context.Context, pl containerPlan) (user, error) {
	id := pl.spec.ID
	u, err := p.createUserAndVolumes(ctx, pl)
	if err != nil {
		undo := context.WithoutCancel(ctx)
		p.removeVolumes(undo, workspaceVolumeName(id), stateVolumeName(id))
		err = errors.Join(err, p.releaseUsers(undo, id))
	}
	return u, err
}

// createUserAndVolumes reserves a user number for a new sandbox and creates the sandbox's volumes.
func (p *Provider) createUserAndVolumes(ctx context.Context, pl containerPlan) (user, error) {
	id := pl.spec.ID
	u, err := p.reserveNewUser(ctx, p.reservationLabels(id))
	if err != nil {
		return u, err
	}
	owned := map[string]string{labelVersion: labelsVersion, labelRole: roleVolume, labelEngine: p.cfg.Engine, labelVolumesOwner: id, labelUser: strconv.Itoa(u.id)}
	if err := p.createLimitedVolumes(ctx, pl.limits.DiskBytes, owned, workspaceVolumeName(id), stateVolumeName(id)); err != nil {
		return u, err
	}
	is, err := p.volumesUser(ctx, id)
	if err != nil {
		return u, err
	}
	if is != u { // another executor creates the same sandbox, and was faster
		if err := p.releaseUser(ctx, u, p.reservationLabels(id)); err != nil {
			return u, err
		}
	}
	folders := []volumeFolder{{helperVolume{workspaceVolumeName(id), "work"}, 0o700}, {helperVolume{stateVolumeName(id), "state"}, 0o700}}
	if pl.spec.LayerTarget != "" {
		folders = append(folders, volumeFolder{helperVolume{pl.spec.LayerTarget, "layer"}, 0o755})
	}
	return is, p.prepareVolumes(ctx, pl.pic, is, defaultUserName, homeDir, folders...)
}

// helperProgram is the program of helper containers. It does not exist, because helper containers are never started.
const helperProgram = "/never-started"

// createHelper creates a helper container, which is never started, and returns its id. Files are copied into the given volumes through it.
// The caller must call discardHelper.
func (p *Provider) createHelper(ctx context.Context, name, image string, volumes ...helperVolume) (string, error) {
	host := &container.HostConfig{NetworkMode: "none", LogConfig: container.LogConfig{Type: "none"}}
	for _, v := range volumes {
		host.Mounts = append(host.Mounts, v.mount("/v/"+v.folder, false))
	}
	made, err := callEngine(ctx, p, "make a helper", func(ctx context.Context) (container.CreateResponse, error) {
		return p.api.ContainerCreate(ctx, &container.Config{
			Image: image, Entrypoint: []string{helperProgram},
			Labels: map[string]string{labelVersion: labelsVersion, labelRole: roleHelper, labelEngine: p.cfg.Engine},
		}, host, nil, nil, name)
	})
	return made.ID, err
}

// discardHelper removes a helper container, also if ctx has ended.
func (p *Provider) discardHelper(ctx context.Context, helper string) {
	err := p.callEngineNoResult(context.WithoutCancel(ctx), "remove a helper", func(ctx context.Context) error {
		return p.api.ContainerRemove(ctx, helper, container.RemoveOptions{Force: true, RemoveVolumes: true})
	})
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) {
		p.cfg.Logger.Warn("a helper stays until the sweep", "container", helper, "error", err)
	}
}

// volumesOwner returns the id of the sandbox after which the volumes of the sandbox id are named. This is another sandbox if id has taken
// over its volumes.
func (p *Provider) volumesOwner(ctx context.Context, id string) (string, error) {
	note, err := p.volumeLabels(ctx, noteVolumeName(id))
	if err != nil || note[labelVolumesOwner] == "" {
		return id, err
	}
	return note[labelVolumesOwner], nil
}

// recordVolumesOwner records on the engine that the volumes of the sandbox id are named after the sandbox owner. It creates the record
// again if there is one, so that the record's creation time is the last use of the workspace.
func (p *Provider) recordVolumesOwner(ctx context.Context, id, owner string) error {
	if _, err := p.removeVolume(ctx, noteVolumeName(id)); err != nil {
		return err
	}
	return p.createVolume(ctx, noteVolumeName(id), map[string]string{
		labelVersion: labelsVersion, labelRole: roleNote, labelEngine: p.cfg.Engine, labelSandbox: id, labelVolumesOwner: owner,
	})
}

// volumesExist reports whether the workspace and state volumes of a sandbox exist.
func (p *Provider) volumesExist(ctx context.Context, owner string) (bool, error) {
	for _, v := range []string{workspaceVolumeName(owner), stateVolumeName(owner)} {
		l, err := p.volumeLabels(ctx, v)
		if err != nil || l[labelRole] != roleVolume {
			return false, err
		}
	}
	return true, nil
}

// RemoveOrphans removes volumes of this provider's engine that no container uses and that were last used longer than olderThan ago. It also
// removes the volumes of other versions of the runner, abandoned helper containers, and dependency layers according to Config.Layers. It
// returns the number of removed volumes, without those of layers and users.
func (p *Provider) RemoveOrphans(ctx context.Context, olderThan time.Duration) (removed int, err error) {
	info, err := callEngine(ctx, p, "read the engine's time", p.api.Info)
	if err != nil {
		return 0, err
	}
	now, err := time.Parse(time.RFC3339Nano, info.SystemTime) // the dates of volumes are from the engine's clock
	if err != nil {
		return 0, fmt.Errorf("the engine's time: %w", err)
	}
	before := now.Add(-olderThan)
	if err := p.removeOldHelpers(ctx, now, before); err != nil {
		return 0, err
	}
	if err := p.removeOldLayers(ctx, now); err != nil {
		return 0, err
	}
	if err := p.removeOrphanServers(ctx); err != nil {
		return 0, err
	}
	used, err := p.ownersInUse(ctx)
	if err != nil {
		return 0, err
	}
	list, last, err := p.engineVolumes(ctx)
	if err != nil {
		return 0, err
	}
	for _, v := range list {
		key := ownerOf(v)
		if used[key] || !last[key].Before(before) {
			continue
		}
		gone, err := p.removeVolume(ctx, v.Name)
		if err != nil {
			return removed, err
		}
		if gone {
			removed++
		}
	}
	if removed > 0 {
		p.reclaimSpace()
	}
	return removed, errors.Join(p.releaseOldUsers(ctx, used, before), p.sweepLoopDevicesIfDue(ctx, list))
}

// ownerOf returns what a volume belongs to: the id of a sandbox, or the digest of a runner.
func ownerOf(v *volume.Volume) string {
	if v.Labels[labelRole] == roleRunner {
		return v.Labels[labelRunner]
	}
	return v.Labels[labelVolumesOwner]
}

// ownersInUse returns the ids of sandboxes and the digests of runners whose volumes are used by a container or by this provider.
func (p *Provider) ownersInUse(ctx context.Context) (map[string]bool, error) {
	list, err := callEngine(ctx, p, "list containers", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", labelRole+"="+roleSandbox))})
	})
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, c := range list {
		used[c.Labels[labelVolumesOwner]], used[c.Labels[labelRunner]], used[c.Labels[labelSandbox]] = true, true, true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.runners {
		used[r.digest] = true
	}
	return used, nil
}

// engineVolumes returns the volumes of this provider's engine, and the times at which they were last used, by owner.
func (p *Provider) engineVolumes(ctx context.Context) ([]*volume.Volume, map[string]time.Time, error) {
	answer, err := callEngine(ctx, p, "list volumes", func(ctx context.Context) (volume.ListResponse, error) {
		return p.api.VolumeList(ctx, volume.ListOptions{Filters: filters.NewArgs(
			filters.Arg("label", labelRole), filters.Arg("label", labelEngine+"="+p.cfg.Engine))})
	})
	if err != nil {
		return nil, nil, err
	}
	var out []*volume.Volume
	last := map[string]time.Time{}
	for _, v := range answer.Volumes {
		if slices.Contains([]string{roleLayer, roleComplete, roleLastUse, roleUser}, v.Labels[labelRole]) {
			continue
		}
		made, err := time.Parse(time.RFC3339, v.CreatedAt)
		if err != nil {
			return nil, nil, fmt.Errorf("volume %s: its date: %w", v.Name, err)
		}
		if key := ownerOf(v); made.After(last[key]) {
			last[key] = made
		}
		out = append(out, v)
	}
	return out, last, nil
}

// removeOldHelpers removes helper containers that were created before the time before. It keeps a running volume tool, which ends by
// itself.
func (p *Provider) removeOldHelpers(ctx context.Context, now, before time.Time) error {
	list, err := callEngine(ctx, p, "list helpers", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(
			filters.Arg("label", labelRole+"="+roleHelper), filters.Arg("label", labelEngine+"="+p.cfg.Engine))})
	})
	if err != nil {
		return err
	}
	for _, c := range list {
		made := time.Unix(c.Created, 0)
		starting := c.State == container.StateCreated && c.Command != helperProgram && now.Sub(made) < apiTimeout
		if c.State != container.StateRunning && !starting && made.Before(before) {
			p.discardHelper(ctx, c.ID)
		}
	}
	return nil
}

// engineCPUs returns the number of CPUs of the engine's machine. A container cannot have more.
func (p *Provider) engineCPUs(ctx context.Context) (int64, error) {
	if n := p.cpus.Load(); n > 0 {
		return n, nil
	}
	info, err := callEngine(ctx, p, "read the engine's number of CPUs", func(ctx context.Context) (system.Info, error) { return p.api.Info(ctx) })
	if err != nil {
		return 0, err
	}
	if err := p.checkUsers(info); err != nil {
		return 0, err
	}
	p.cpus.Store(int64(info.NCPU))
	return int64(info.NCPU), nil
}
