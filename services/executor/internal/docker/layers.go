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
	// layerDir is the path in a sandbox of the layer: the packages on which its agent depends.
	layerDir    = "/opt/spool/dependencies"
	layerPrefix = namePrefix + "layer-"
	// touchEvery is the minimum time between two records that a layer was used.
	touchEvery = time.Hour
	// layerWait is added to the time limit of an installation to get the time limit for waiting until another executor
	// has completed a layer.
	layerWait = 5 * time.Minute
	// layerPollInterval is the interval at which the executor checks whether another executor has completed a layer.
	layerPollInterval = 500 * time.Millisecond
)

// completeNote returns the name of the volume that records which volume is the complete layer of a digest. It is a note on
// the engine and not a file in the layer, because processes in sandboxes cannot create it.
func (p *Provider) completeNote(digest string) string { return p.layerName(digest) + "-whole" }
func (p *Provider) lastUseNote(digest string) string  { return p.layerName(digest) + "-used" }

// layerName returns the prefix of all names for a digest. It has the engine's name: engines on the same Docker daemon
// share no layers, because they may use different registries.
func (p *Provider) layerName(digest string) string { return layerPrefix + p.cfg.Engine + "-" + digest }

// layerVolumePrefix returns the prefix of the names of the volumes in which the layer of a digest is being created.
func (p *Provider) layerVolumePrefix(digest string) string { return p.layerName(digest[:16]) + "-" }

var _ sandbox.LayerCreator = (*Provider)(nil)

// Layer returns the name of the volume with the packages. If there is none, Layer installs the packages into a new volume
// with a random name, in a sandbox with the hardening and the limits of any other. Once the volume is complete, Layer
// records on the engine that it is the layer. Among several executors the name of a helper container is the lock.
func (p *Provider) Layer(ctx context.Context, want sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	pic, err := p.image(ctx, fieldImage, cmp.Or(want.Image, p.cfg.Image))
	if err != nil {
		return "", err
	}
	digest := want.LayerDigest(pic.id, pic.platform)
	name, err := p.completeLayer(ctx, digest)
	if err != nil {
		return "", err
	}
	if name != "" {
		return name, p.touch(ctx, digest)
	}
	if use.Build == nil {
		return "", &sandbox.Error{Code: sandbox.CodeDependenciesUnavailable, Message: "the agent's dependencies cannot be installed: sandboxes of this executor cannot reach a registry: set its egress proxy"}
	}
	if use.Begun != nil {
		use.Begun()
	}
	return p.layers.Do(ctx, digest, func(ctx context.Context) (string, error) {
		return p.makeLayer(ctx, digest, pic.ref, want, use)
	})
}

// completeLayer returns the volume of a complete layer, "" if there is none.
func (p *Provider) completeLayer(ctx context.Context, digest string) (string, error) {
	note, err := p.volumeLabels(ctx, p.completeNote(digest))
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
	_, err = p.removeVolume(ctx, p.completeNote(digest))
	return "", err
}

// touch records on the engine that a layer was used now, unless the last record is younger than touchEvery.
func (p *Provider) touch(ctx context.Context, digest string) error {
	name := p.lastUseNote(digest)
	v, err := call(ctx, p, "look up volume "+name, func(ctx context.Context) (volume.Volume, error) { return p.api.VolumeInspect(ctx, name) })
	if err == nil {
		if made, perr := time.Parse(time.RFC3339, v.CreatedAt); perr == nil && time.Since(made) < touchEvery {
			return nil
		}
		_, err = p.removeVolume(ctx, name)
	} else if errdefs.IsNotFound(err) {
		err = nil
	}
	if err != nil {
		return err
	}
	return p.makeVolume(ctx, name, map[string]string{labelVersion: layoutVersion, labelRole: roleLastUse, labelEngine: p.cfg.Engine, labelLayer: digest})
}

// makeLayer creates the layer of a digest and returns its volume. If another executor creates it at the same time, makeLayer waits for that
// and returns that volume.
func (p *Provider) makeLayer(ctx context.Context, digest, image string, want sandbox.LayerPackages, use sandbox.LayerBuilder) (is string, err error) {
	helper, err := p.lockLayer(ctx, digest, image)
	if err != nil {
		return "", err
	}
	defer p.discard(ctx, helper)
	if is, err := p.completeLayer(ctx, digest); is != "" || err != nil {
		return is, err
	}
	name := p.layerVolumePrefix(digest) + strings.ToLower(rand.Text())
	defer func() {
		if err == nil && is == name {
			return
		}
		p.removeDisks(context.WithoutCancel(ctx), name)
	}()
	// Installers may temporarily use twice the limit; the result is measured at the end.
	labels := map[string]string{labelVersion: layoutVersion, labelRole: roleLayer, labelEngine: p.cfg.Engine, labelLayer: digest}
	if err := p.makeLimited(ctx, 2*p.cfg.Layers.MaxBytes, labels, name); err != nil {
		return "", err
	}
	began := time.Now()
	err = use.Build(ctx, sandbox.Spec{Image: want.Image, LayerTarget: name}, func(ctx context.Context, box sandbox.Sandbox) error { return p.install(ctx, box, image, want) })
	if err != nil {
		return "", err
	}
	p.cfg.Logger.Info("made a layer", "volume", name, "packages", want.String(), "took", time.Since(began).Round(time.Millisecond))
	if err := p.touch(ctx, digest); err != nil {
		return "", err
	}
	return p.publish(ctx, digest, name)
}

// publish records that the volume name is the complete layer of a digest, and returns the volume that is recorded. That is another one if an
// executor that considered the lock abandoned has published its volume first.
func (p *Provider) publish(ctx context.Context, digest, name string) (string, error) {
	err := p.makeVolume(ctx, p.completeNote(digest), map[string]string{labelVersion: layoutVersion, labelRole: roleComplete, labelEngine: p.cfg.Engine, labelLayer: name})
	if err != nil {
		return "", err
	}
	is, err := p.completeLayer(ctx, digest)
	if err == nil && is == "" {
		err = fmt.Errorf("layer %s: %w", digest, errVanished)
	}
	return is, err
}

// lockLayer creates a helper whose name is the lock on a digest. A lock that is old while no sandbox fills a layer of
// the digest is abandoned: the sweep removes the sandbox of an executor that died.
func (p *Provider) lockLayer(ctx context.Context, digest, image string) (string, error) {
	name := p.layerName(digest) + "-make"
	limit := p.cfg.Layers.Within + layerWait
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(layerPollInterval)
	defer tick.Stop()
	var holder string
	var since time.Time
	for {
		id, err := p.helper(bounded, name, image)
		if err == nil || !errdefs.IsConflict(err) && bounded.Err() == nil {
			return id, err
		}
		other, err := call(bounded, p, "inspect the lock of the layer", func(ctx context.Context) (container.InspectResponse, error) { return p.api.ContainerInspect(ctx, name) })
		switch {
		case bounded.Err() != nil || errdefs.IsNotFound(err): // removed just now, or not created completely
		case err != nil:
			return "", err
		case other.ID != holder:
			holder, since = other.ID, time.Now()
		case time.Since(since) > p.stale:
			if since, err = p.removeAbandoned(bounded, digest, holder); err != nil {
				return "", err
			}
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-bounded.Done():
			return "", layer.Failed("another executor of the engine has been installing for %s; if there is no other executor, remove the container %s", limit, name)
		case <-tick.C:
		}
	}
}

// removeAbandoned removes the lock on a digest if no sandbox fills a layer of that digest. It returns the engine's time.
func (p *Provider) removeAbandoned(ctx context.Context, digest, lock string) (time.Time, error) {
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
	p.discard(ctx, lock)
	return time.Now(), nil
}

// layersInUse returns the names of the volumes into which sandboxes install packages, and of the layers that sandboxes mount.
func (p *Provider) layersInUse(ctx context.Context) (filled, seen map[string]bool, err error) {
	list, err := call(ctx, p, "list containers", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", labelRole+"="+roleSandbox))})
	})
	filled, seen = map[string]bool{}, map[string]bool{}
	for _, c := range list {
		filled[c.Labels[labelFills]], seen[c.Labels[labelLayer]] = true, true
	}
	delete(filled, "")
	delete(seen, "")
	return filled, seen, err
}

// removeOldLayers removes the layers that were not used for Config.Layers.Keep, and the volumes that never became a layer. now is the
// engine's time.
func (p *Provider) removeOldLayers(ctx context.Context, now time.Time) error {
	answer, err := call(ctx, p, "list layers", func(ctx context.Context) (volume.ListResponse, error) {
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
			keep = p.cfg.Layers.Within + layerWait
		} else {
			last = latest(last, made[note], made[p.lastUseNote(digest)])
		}
		if filled[name] || seen[name] || !last.Before(now.Add(-keep)) {
			continue
		}
		p.cfg.Logger.Info("sweep: removed an unused layer", "volume", name, "lastUse", last)
		errs = append(errs, p.dropLayer(ctx, name, digest, whole[name]))
	}
	for name, digest := range notes { // notes of layers that do not exist
		if _, there := made[p.completeNote(digest)]; !there && made[name].Before(now.Add(-p.cfg.Layers.Keep)) {
			_, err := p.removeVolume(ctx, name)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// dropLayer removes the layer in the volume name. It first removes the notes about the layer, so that no executor finds the layer any more;
// note is "" if it has none.
func (p *Provider) dropLayer(ctx context.Context, name, digest, note string) error {
	if note != "" {
		for _, n := range []string{note, p.lastUseNote(digest)} {
			if _, err := p.removeVolume(ctx, n); err != nil {
				return err
			}
		}
	}
	_, err := p.removeVolume(ctx, name)
	p.reclaimSpace()
	return err
}

func latest(list ...time.Time) (last time.Time) {
	for _, t := range list {
		if t.After(last) {
			last = t
		}
	}
	return last
}
