package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// ownRunner returns a config whose runner has a unique digest, so that a test may change its volume.
func ownRunner(t testing.TB) (Config, string) {
	t.Helper()
	cfg := needEngine(t)
	raw, err := os.ReadFile(cfg.Runner)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Runner = filepath.Join(t.TempDir(), "runner")
	if err := os.WriteFile(cfg.Runner, append(raw, t.Name()+engine...), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	_, sum, err := copyWithDigest(cfg.Runner, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	name := (&runnerBinary{digest: sum}).volumeName()
	p := provide(t, cfg)
	t.Cleanup(func() {
		if _, err := p.removeVolume(context.Background(), name); err != nil {
			t.Error(err)
		}
		if l, err := p.volumeLabels(context.Background(), name); l != nil || err != nil {
			t.Errorf("the runner's volume stays: %v", err)
		}
	})
	return cfg, name
}

// Several executors copy the same runner concurrently; it is copied once, and completely.
func TestRunnerVolumeAtOnce(t *testing.T) {
	t.Parallel()
	cfg, name := ownRunner(t)
	var all sync.WaitGroup
	for range 3 {
		p := provide(t, cfg)
		for range 2 {
			spec := newSpec(t)
			all.Go(func() {
				b, err := p.Create(t.Context(), spec)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := b.Files().List(t.Context(), ""); err != nil {
					t.Error(err)
				}
				if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	p := provide(t, cfg)
	if l, err := p.volumeLabels(t.Context(), name); err != nil || l[labelRole] != roleRunner {
		t.Errorf("volume %s: %v, %v", name, l, err)
	}
	if _, err := p.api.ContainerInspect(t.Context(), name+"-fill"); err == nil {
		t.Error("the helper stays")
	}
}

// Several executors that create the same sandbox concurrently get one sandbox.
func TestCreateAtOnce(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	spec := newSpec(t)
	var mu sync.Mutex
	made := map[string]bool{}
	var all sync.WaitGroup
	for range 4 {
		p := provide(t, cfg)
		all.Go(func() {
			b, err := p.Create(t.Context(), spec)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			made[b.(*box).container] = true
		})
	}
	all.Wait()
	if len(made) != 1 {
		t.Errorf("containers: %v", made)
	}
	p := provide(t, cfg)
	create(t, p, spec)
	for range 3 {
		all.Go(func() {
			if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// The next executor completes a volume that an executor that died has begun to fill.
func TestRunnerVolumeHalfFilled(t *testing.T) {
	t.Parallel()
	cfg, name := ownRunner(t)
	p := provide(t, cfg)
	p.stale = time.Millisecond
	ctx := t.Context()
	if err := p.createVolume(ctx, name, map[string]string{labelRole: roleRunner}); err != nil {
		t.Fatal(err)
	}
	helper, err := p.createHelper(ctx, name+"-fill", testImage, helperVolume{name, "runner"})
	if err != nil {
		t.Fatal(err)
	}
	var half bytes.Buffer
	out := tar.NewWriter(&half)
	if err := out.WriteHeader(&tar.Header{Name: "v/runner/runner", Mode: 0o555, Size: 4, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write([]byte("half")); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.api.CopyToContainer(ctx, helper, "/", &half, container.CopyToContainerOptions{}); err != nil {
		t.Fatal(err)
	}
	create(t, p, newSpec(t)) // its runner answers
}

// A volume that was removed by hand is created again, although the provider has seen it before.
func TestRunnerVolumeVanishes(t *testing.T) {
	t.Parallel()
	cfg, name := ownRunner(t)
	p := provide(t, cfg)
	spec := newSpec(t)
	create(t, p, spec)
	if gone, err := p.removeVolume(t.Context(), name); gone || err != nil {
		t.Errorf("a volume in use was removed: %v", err)
	}
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
		t.Fatal(err)
	}
	p.disks.sweepings.Wait() // it runs in a container that has the volume
	if gone, err := p.removeVolume(t.Context(), name); !gone || err != nil {
		t.Fatalf("the volume is not removed: %v", err)
	}
	create(t, p, newSpec(t))
}

// exists reports for each volume whether it exists.
func exists(t testing.TB, p *Provider, names ...string) []bool {
	t.Helper()
	out := make([]bool, len(names))
	for i, n := range names {
		l, err := p.volumeLabels(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = l != nil
	}
	return out
}

// Volumes are removed with the last sandbox that uses them, whichever sandbox they are named after.
func TestVolumesOfSeveral(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	first := newSpec(t)
	create(t, p, first)
	second := newSpec(t)
	second.Labels.Session, second.Workspace = first.Labels.Session, first.ID
	b := create(t, p, second) // the first's container is still there
	if err := b.Files().Put(t.Context(), "x", strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	// The first is wiped, but the second has its volumes.
	if err := p.Terminate(t.Context(), first.ID, true); err != nil {
		t.Fatal(err)
	}
	if got := exists(t, p, workspaceVolumeName(first.ID), stateVolumeName(first.ID), workspaceVolumeName(second.ID)); !got[0] || !got[1] || got[2] {
		t.Errorf("volumes of the first, and one of the second: %v", got)
	}
	if out, _, _ := sh(t, b, `cat x`); out != "x" {
		t.Errorf("x is %q", out)
	}
	if err := p.Terminate(t.Context(), second.ID, false); err != nil {
		t.Fatal(err)
	}
	// A sandbox in between was ended twice concurrently, and has its note again.
	between := newSpec(t).ID
	if err := p.recordVolumesOwner(t.Context(), between, first.ID); err != nil {
		t.Fatal(err)
	}
	// Long after its container is gone, the second can be wiped.
	if err := p.Terminate(t.Context(), second.ID, true); err != nil {
		t.Fatal(err)
	}
	if got := exists(t, p, workspaceVolumeName(first.ID), stateVolumeName(first.ID), noteVolumeName(first.ID), noteVolumeName(second.ID), noteVolumeName(between)); slices.Contains(got, true) {
		t.Errorf("volumes stay: %v", got)
	}
}

// Orphans removes what no sandbox needs, and nothing else.
func TestOrphans(t *testing.T) {
	t.Parallel()
	cfg, _ := ownRunner(t)
	cfg.Engine = engine + "-orphans" // the sweep must not meet other tests' sandboxes
	p := provide(t, cfg)
	spec := func() sandbox.Spec {
		s := newSpec(t)
		s.Labels.Engine = cfg.Engine
		return s
	}
	alive, left, third := spec(), spec(), spec()
	create(t, p, alive)
	create(t, p, left)
	if err := p.Terminate(t.Context(), left.ID, false); err != nil {
		t.Fatal(err)
	}
	third.Workspace = left.ID
	b := create(t, p, third) // has the volumes of left
	helper, err := p.createHelper(t.Context(), "", testImage)
	if err != nil {
		t.Fatal(err)
	}
	old, err := p.api.VolumeCreate(t.Context(), volume.CreateOptions{Name: "spool-test-" + strings.ToLower(engine) + "-old", Labels: map[string]string{
		labelRole: roleVolume, labelEngine: cfg.Engine, labelVolumesOwner: newID(t, events.KindSandbox),
	}})
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := p.api.VolumeCreate(t.Context(), volume.CreateOptions{Name: "spool-test-" + strings.ToLower(engine) + "-foreign", Labels: map[string]string{
		labelRole: roleVolume, labelEngine: "another", labelVolumesOwner: newID(t, events.KindSandbox),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if gone, err := p.removeVolume(context.Background(), foreign.Name); !gone || err != nil {
			t.Errorf("the volume of another engine: %v, %v", gone, err)
		}
	})

	if n, err := p.RemoveOrphans(t.Context(), time.Hour); n != 0 || err != nil {
		t.Errorf("within the hour: %d removed, %v", n, err)
	}
	second := func() { time.Sleep(1100 * time.Millisecond) } // the engine's dates are whole seconds
	second()
	if n, err := p.RemoveOrphans(t.Context(), 0); n != 1 || err != nil {
		t.Errorf("%d removed, %v, want the old one", n, err)
	}
	if got := exists(t, p, old.Name, foreign.Name, workspaceVolumeName(alive.ID), workspaceVolumeName(left.ID), noteVolumeName(third.ID)); got[0] || !got[1] || !got[2] || !got[3] || !got[4] {
		t.Errorf("volumes: %v", got)
	}
	if _, err := p.api.ContainerInspect(t.Context(), helper); err == nil {
		t.Error("a helper that was left behind stays")
	}
	if err := b.Files().Put(t.Context(), "x", strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	// A sandbox that was released permanently.
	if err := p.Terminate(t.Context(), third.ID, false); err != nil {
		t.Fatal(err)
	}
	second()
	if n, err := p.RemoveOrphans(t.Context(), 0); n != 3 || err != nil {
		t.Errorf("%d removed, %v, want workspace, records and note", n, err)
	}
}

// A sandbox whose container was removed by hand keeps its volumes.
func TestContainerRemovedByHand(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	first := newSpec(t)
	b := create(t, p, first)
	if err := b.Files().Put(t.Context(), "x", strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	byHand := func(b *box) {
		t.Helper()
		if err := p.api.ContainerRemove(t.Context(), b.container, container.RemoveOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		byHand(b)
		if _, err := p.Attach(t.Context(), b.id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("attach: %v", err)
		}
		next := newSpec(t)
		next.Workspace = b.id
		b = create(t, p, next)
		if out, _, _ := sh(t, b, `cat x`); out != "x" || !b.HasWorkspace() {
			t.Errorf("x is %q, kept %v", out, b.HasWorkspace())
		}
	}
}

func TestImages(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	p := provide(t, cfg)
	try := func(ref string) error {
		t.Helper()
		spec := newSpec(t)
		spec.Image = ref
		_, err := p.Create(t.Context(), spec)
		if err == nil {
			err = p.Terminate(context.Background(), spec.ID, true)
		}
		return err
	}
	wantCode(t, "an image that is not there", try("spool-test.invalid/none:none"), sandbox.CodeImageNotFound, "spool-test.invalid/none:none")
	wantCode(t, "a name that is none", try("Not An Image"), sandbox.CodeImageNotFound, "check its name")
	other := strings.ToLower("spool-test:other-" + engine)
	bare(t, p, other, "s390x")
	wantCode(t, "an image for another machine", try(other), sandbox.CodeImageUnsupported, "s390x")
	cfg.Runner = t.TempDir()
	if err := os.Link(mustRunner(t), filepath.Join(cfg.Runner, "runner-linux-amd64")); err != nil {
		t.Fatal(err)
	}
	p = provide(t, cfg)
	wantCode(t, "an image for another machine", try(other), sandbox.CodeImageUnsupported, "no runner")
	if err := try(testImage); err != nil {
		t.Errorf("with a folder of runners: %v", err)
	}
	cfg.Image = ""
	cfg.DiskLimit = DiskLimitWatch // there is no image with mkfs
	p = provide(t, cfg)
	wantCode(t, "no image", try(""), sandbox.CodeImageNotFound, "default image")
}

func mustRunner(t testing.TB) string {
	t.Helper()
	path, err := runners()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Settings of an image do not weaken the restrictions.
func TestImage_DoesNotWeakenTheRestrictions(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	ref := strings.ToLower("spool-test:wishes-" + engine)
	made, err := p.api.ContainerCreate(t.Context(), &container.Config{Image: testImage, Entrypoint: []string{"/x"}}, nil, nil, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.api.ContainerCommit(t.Context(), made.ID, container.CommitOptions{Reference: ref, Config: &container.Config{
		User: "root", Volumes: map[string]struct{}{"/data": {}, "/tmp": {}, "/workspace": {}}, Env: []string{"OF_THE_IMAGE=1", "PATH=/opt/bin:/usr/bin:/bin"},
		Entrypoint: []string{"/bin/false"}, Cmd: []string{"x"}, WorkingDir: "/nowhere", StopSignal: "SIGKILL",
		Labels:      map[string]string{labelTenant: "evil", labelExecutor: "evil"},
		Healthcheck: &container.HealthConfig{Test: []string{"CMD", "false"}, Interval: time.Second},
	}})
	p.discardHelper(t.Context(), made.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := p.api.ImageRemove(context.Background(), ref, image.RemoveOptions{Force: true, PruneChildren: true}); err != nil {
			t.Error(err)
		}
	})
	spec := newSpec(t)
	spec.Image = ref
	spec.Labels.Tenant, spec.Labels.Session = "", ""
	b := create(t, p, spec)
	for line, want := range map[string]string{
		`id -un`:                       defaultUserName,
		`pwd`:                          workspaceDir,
		`echo $OF_THE_IMAGE $PATH`:     "1 /opt/bin:/usr/bin:/bin",
		`stat -f -c %T /data /tmp`:     "tmpfs\ntmpfs",
		`touch /data/x && ls /data`:    "x",
		`tr '\0' ' ' </proc/1/cmdline`: "/spool/bin/runner serve",
		`stat -f -c %T /workspace`:     "ext2/ext3",
	} {
		if out, errs, _ := sh(t, b, line); out != want && want != "ext2/ext3" || out == "tmpfs" {
			t.Errorf("%s: %q, want %q (%s)", line, out, want, errs)
		}
	}
	infos, err := p.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range infos {
		if i.ID == spec.ID && i.Labels != spec.Labels {
			t.Errorf("the image's labels count: %+v", i)
		}
	}
	got, err := p.api.ContainerInspect(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	if got.State.Health != nil {
		t.Errorf("the image's health check runs: %+v", got.State.Health)
	}
	for _, m := range got.Mounts {
		if m.Type == "volume" && !strings.HasPrefix(m.Name, namePrefix) {
			t.Errorf("an anonymous volume: %+v", m)
		}
	}
}

// The error for a runner that ends at once, or never listens, has the end of its output.
func TestRunnerSilent(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Runner = "/bin/false" // a program for Linux that is no runner
	p := provide(t, cfg)
	spec := newSpec(t)
	if cfg.DiskLimit == DiskLimitLoop {
		_, err := p.Create(t.Context(), spec)
		wantCode(t, "make the volumes", err, sandbox.CodeSandboxFailed, "volume make")
		if got := exists(t, p, workspaceVolumeName(spec.ID), stateVolumeName(spec.ID)); got[0] || got[1] {
			t.Errorf("volumes stay: %v", got)
		}
	}
	cfg.DiskLimit = DiskLimitWatch
	p = provide(t, cfg)
	_, err := p.Create(t.Context(), spec)
	wantCode(t, "create", err, sandbox.CodeRunnerSilent, "does not answer")
	if got := exists(t, p, workspaceVolumeName(spec.ID), stateVolumeName(spec.ID)); got[0] || got[1] {
		t.Errorf("volumes stay: %v", got)
	}
	if infos, err := p.List(t.Context()); err != nil {
		t.Error(err)
	} else {
		for _, i := range infos {
			if i.ID == spec.ID {
				t.Errorf("the container stays: %+v", i)
			}
		}
	}
	_, sum, err := copyWithDigest(cfg.Runner, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if gone, err := p.removeVolume(t.Context(), (&runnerBinary{digest: sum}).volumeName()); !gone || err != nil {
		t.Errorf("its volume: %v, %v", gone, err)
	}
	for _, runner := range []string{filepath.Join(t.TempDir(), "none"), "/etc/hostname"} {
		cfg.Runner = runner
		_, err := provide(t, cfg).Create(t.Context(), newSpec(t))
		wantCode(t, runner, err, sandbox.CodeSandboxFailed, "runner's binary")
	}
	cfg = needEngine(t)
	cfg.Runtime = "no-such-runtime"
	_, err = provide(t, cfg).Create(t.Context(), newSpec(t))
	wantCode(t, "a runtime that the engine does not have", err, sandbox.CodeSandboxFailed, "no-such-runtime")
}
