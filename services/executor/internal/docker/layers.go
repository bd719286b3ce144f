package docker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

const (
	// layerDir is the path in a sandbox at which the dependency layer is mounted: the packages on which the agent depends.
	layerDir    = "/opt/spool/dependencies"
	layerPrefix = namePrefix + "layer-"
	// layerUseInterval is the minimum time between two records that a dependency layer was used.
	layerUseInterval = time.Hour
	// layerWaitMargin plus the time limit of an installation is the maximum time to wait until another executor has completed a dependency
	// layer.
	layerWaitMargin = 5 * time.Minute
	// layerPollInterval is the interval at which the executor checks whether another executor has completed a dependency layer.
	layerPollInterval = 500 * time.Millisecond
)

// completeNoteName returns the name of the empty volume whose labels name the complete layer of a digest. It is a volume and not a file in
// the layer, because processes in sandboxes cannot create volumes.
func (p *Provider) completeNoteName(digest string) string {
	return p.layerNamePrefix(digest) + "-whole"
}

// lastUseNoteName returns the name of the empty volume whose creation time is the last use of the layer of a digest.
func (p *Provider) lastUseNoteName(digest string) string { return p.layerNamePrefix(digest) + "-used" }

// layerNamePrefix returns the prefix of the names of all volumes and containers for the layer of a digest. It contains the engine's name:
// engines on the same Docker daemon share no layers, because they may use different registries.
func (p *Provider) layerNamePrefix(digest string) string {
	return layerPrefix + p.cfg.Engine + "-" + digest
}

// layerVolumePrefix returns the prefix of the names of volumes into which the packages of the layer of a digest are installed.
func (p *Provider) layerVolumePrefix(digest string) string {
	return p.layerNamePrefix(digest[:16]) + "-"
}

var _ sandbox.LayerCreator = (*Provider)(nil)

// Layer returns the name of the volume with the wanted packages. If there is none, it installs the packages into a new volume with a random
// name, in a sandbox that is as hardened and limited as any other. When the volume is complete, Layer records that on the engine. A helper
// container, whose name only one executor can create, is the lock among executors.
func (p *Provider) Layer(ctx context.Context, want sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	pic, err := p.lookUpAllowedImage(ctx, imageFields, cmp.Or(want.Image, p.cfg.Image))
	if err != nil {
		return "", err
	}
	digest := want.LayerDigest(pic.id, pic.platform)
	name, err := p.completeLayer(ctx, digest)
	if err != nil {
		return "", err
	}
	if name != "" {
		return name, p.recordLayerUse(ctx, digest)
	}
	if use.Build == nil {
		return "", &sandbox.Error{Code: sandbox.CodeDependenciesUnavailable, Message: "the agent's dependencies cannot be installed: sandboxes of this executor cannot reach a registry: set its egress proxy"}
	}
	if use.Begun != nil {
		use.Begun()
	}
	return p.layers.Do(ctx, digest, func(ctx context.Context) (string, error) {
		return p.createLayer(ctx, digest, pic.ref, want, use)
	})
}

// completeLayer returns the name of the volume of the complete layer of a digest, or "" if there is none.
func (p *Provider) completeLayer(ctx context.Context, digest string) (string, error) {
	note, err := p.volumeLabels(ctx, p.completeNoteName(digest))
	if err != nil || note[labelLayer] == "" {
		return "", err
	}
	name := note[labelLayer]
	l, err := p.volumeLabels(ctx, name)
	if err != nil {
		return "", err
	}
	if l[labelLayer] == digest {
		return name, nil
	}
	p.cfg.Logger.Warn("the volume of a layer is missing; it is created again", "volume", name)
	_, err = p.removeVolume(ctx, p.completeNoteName(digest))
	return "", err
}

// recordLayerUse records on the engine that the layer of a digest is used now, unless the last record is younger than layerUseInterval.
func (p *Provider) recordLayerUse(ctx context.Context, digest string) error {
	name := p.lastUseNoteName(digest)
	v, err := callEngine(ctx, p, "look up volume "+name, func(ctx context.Context) (volume.Volume, error) { return p.api.VolumeInspect(ctx, name) })
	if err == nil {
		if made, perr := time.Parse(time.RFC3339, v.CreatedAt); perr == nil && time.Since(made) < layerUseInterval {
			return nil
		}
		_, err = p.removeVolume(ctx, name)
	} else if errdefs.IsNotFound(err) {
		err = nil
	}
	if err != nil {
		return err
	}
	return p.createVolume(ctx, name, map[string]string{labelVersion: labelsVersion, labelRole: roleLastUse, labelEngine: p.cfg.Engine, labelLayer: digest})
}

// createLayer creates the dependency layer of a digest and returns its volume. If another executor creates the same layer at the same time,
// createLayer waits for that executor and returns the other's volume.
func (p *Provider) createLayer(ctx context.Context, digest, image string, want sandbox.LayerPackages, use sandbox.LayerBuilder) (is string, err error) {
	helper, err := p.lockLayer(ctx, digest, image)
	if err != nil {
		return "", err
	}
	defer p.discardHelper(ctx, helper)
	if is, err := p.completeLayer(ctx, digest); is != "" || err != nil {
		return is, err
	}
	name := p.layerVolumePrefix(digest) + strings.ToLower(rand.Text())
	defer func() {
		if err == nil && is == name {
			return
		}
		p.removeVolumes(context.WithoutCancel(ctx), name)
	}()
	// Installers may temporarily use twice the limit; the result is measured at the end.
	labels := map[string]string{labelVersion: labelsVersion, labelRole: roleLayer, labelEngine: p.cfg.Engine, labelLayer: digest}
	if err := p.createLimitedVolumes(ctx, 2*p.cfg.Layers.MaxBytes, labels, name); err != nil {
		return "", err
	}
	began := time.Now()
	err = use.Build(ctx, sandbox.Spec{Image: want.Image, LayerTarget: name}, func(ctx context.Context, box sandbox.Sandbox) error { return p.installPackages(ctx, box, image, want) })
	if err != nil {
		return "", err
	}
	p.cfg.Logger.Info("made a layer", "volume", name, "packages", want.String(), "took", time.Since(began).Round(time.Millisecond))
	if err := p.recordLayerUse(ctx, digest); err != nil {
		return "", err
	}
	return p.publishLayer(ctx, digest, name)
}

// publishLayer records that the volume name is the complete layer of a digest, and returns the name of the recorded volume. This is another
// volume if another executor has published first, because it considered this executor's lock abandoned.
func (p *Provider) publishLayer(ctx context.Context, digest, name string) (string, error) {
	err := p.createVolume(ctx, p.completeNoteName(digest), map[string]string{labelVersion: labelsVersion, labelRole: roleComplete, labelEngine: p.cfg.Engine, labelLayer: name})
	if err != nil {
		return "", err
	}
	is, err := p.completeLayer(ctx, digest)
	if err == nil && is == "" {
		err = fmt.Errorf("layer %s: %w", digest, errVanished)
	}
	return is, err
}

// lockLayer creates the helper container whose name is the lock on the layer of a digest, and returns the container's id. A lock is
// abandoned if it is old and no sandbox installs packages for the digest: the sweep removes the sandbox of an executor that died.
func (p *Provider) lockLayer(ctx context.Context, digest, image string) (string, error) {
	name := p.layerNamePrefix(digest) + "-make"
	limit := p.cfg.Layers.Within + layerWaitMargin
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(layerPollInterval)
	defer tick.Stop()
	var holder string
	var since time.Time
	for {
		id, err := p.createHelper(bounded, name, image)
		if err == nil || !errdefs.IsConflict(err) && bounded.Err() == nil {
			return id, err
		}
		other, err := callEngine(bounded, p, "inspect the lock of the layer", func(ctx context.Context) (container.InspectResponse, error) { return p.api.ContainerInspect(ctx, name) })
		switch {
		case bounded.Err() != nil || errdefs.IsNotFound(err): // removed just now, or not created completely
		case err != nil:
			return "", err
		case other.ID != holder:
			holder, since = other.ID, time.Now()
		case time.Since(since) > p.stale:
			if since, err = p.removeAbandonedLock(bounded, digest, holder); err != nil {
				return "", err
			}
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-bounded.Done():
			return "", layer.InstallError("another executor of the engine has been installing for %s; if there is no other executor, remove the container %s", limit, name)
		case <-tick.C:
		}
	}
}

// removeAbandonedLock removes the lock on the layer of a digest if no sandbox installs packages for that digest. It returns the engine's
// time.
func (p *Provider) removeAbandonedLock(ctx context.Context, digest, lock string) (time.Time, error) {
	filling, _, err := p.layersInUse(ctx)
	if err != nil {
		return time.Time{}, err
	}
	for name := range filling {
		if strings.HasPrefix(name, p.layerVolumePrefix(digest)) {
			return time.Now(), nil
		}
	}
	p.cfg.Logger.Warn("removing an abandoned helper", "container", lock)
	p.discardHelper(ctx, lock)
	return time.Now(), nil
}

// layersInUse returns the names of the volumes into which sandboxes install packages, and of the layers that sandboxes mount.
func (p *Provider) layersInUse(ctx context.Context) (filled, seen map[string]bool, err error) {
	list, err := callEngine(ctx, p, "list containers", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", labelRole+"="+roleSandbox))})
	})
	filled, seen = map[string]bool{}, map[string]bool{}
	for _, c := range list {
		filled[c.Labels[labelFilledLayer]], seen[c.Labels[labelLayer]] = true, true
	}
	delete(filled, "")
	delete(seen, "")
	return filled, seen, err
}

// removeOldLayers removes the dependency layers that were not used for Config.Layers.Keep, and the volumes of layers that were never
// completed. now is the engine's time.
func (p *Provider) removeOldLayers(ctx context.Context, now time.Time) error {
	answer, err := callEngine(ctx, p, "list layers", func(ctx context.Context) (volume.ListResponse, error) {
		return p.api.VolumeList(ctx, volume.ListOptions{Filters: filters.NewArgs(
			filters.Arg("label", labelLayer), filters.Arg("label", labelEngine+"="+p.cfg.Engine))})
	})
	if err != nil {
		return err
	}
	filled, seen, err := p.layersInUse(ctx)
	if err != nil {
		return err
	}
	made, whole, of := map[string]time.Time{}, map[string]string{}, map[string]string{} // creation times by volume; notes by volume; digests by volume
	notes := map[string]string{}                                                        // notes of a last use, with their digests
	for _, v := range answer.Volumes {
		if made[v.Name], err = time.Parse(time.RFC3339, v.CreatedAt); err != nil {
			return fmt.Errorf("volume %s: its date: %w", v.Name, err)
		}
		switch v.Labels[labelRole] {
		case roleLayer:
			of[v.Name] = v.Labels[labelLayer]
		case roleComplete:
			whole[v.Labels[labelLayer]] = v.Name
		case roleLastUse:
			notes[v.Name] = v.Labels[labelLayer]
		}
	}
	var errs []error
	for name, digest := range of {
		last, keep := made[name], p.cfg.Layers.Keep
		if note := whole[name]; note == "" {
			keep = p.cfg.Layers.Within + layerWaitMargin
		} else {
			last = latestTime(last, made[note], made[p.lastUseNoteName(digest)])
		}
		if filled[name] || seen[name] || !last.Before(now.Add(-keep)) {
			continue
		}
		p.cfg.Logger.Info("sweep: removed an unused layer", "volume", name, "lastUse", last)
		errs = append(errs, p.removeLayer(ctx, name, digest, whole[name]))
	}
	for name, digest := range notes { // notes of layers that do not exist
		if _, there := made[p.completeNoteName(digest)]; !there && made[name].Before(now.Add(-p.cfg.Layers.Keep)) {
			_, err := p.removeVolume(ctx, name)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// removeLayer removes the dependency layer in the volume name. It first removes the volumes that record the layer as complete and used, so
// that no executor finds the layer any more. note is the name of the first of them, or "" if there is none.
func (p *Provider) removeLayer(ctx context.Context, name, digest, note string) error {
	if note != "" {
		for _, n := range []string{note, p.lastUseNoteName(digest)} {
			if _, err := p.removeVolume(ctx, n); err != nil {
				return err
			}
		}
	}
	_, err := p.removeVolume(ctx, name)
	p.reclaimSpace()
	return err
}

// latestTime returns the latest of some times.
func latestTime(list ...time.Time) (last time.Time) {
	for _, t := range list {
		if t.After(last) {
			last = t
		}
	}
	return last
}
