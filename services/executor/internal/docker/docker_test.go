package docker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/sandbox/sandboxtest"
)

// testImage is the image of all sandboxes in the tests.
const testImage = "debian:bookworm-slim"

var (
	scratch   string                             // of the test binary
	engine    = "test-" + rand.Text()[:12]       // in all labels
	runners   = sync.OnceValues(buildRunner)     // the runner's binary
	diskLimit = sync.OnceValues(chooseDiskLimit) // of the engine
)

func TestMain(m *testing.M) {
	if os.Getenv(asSSH) != "" { // a test made this binary the ssh command
		os.Exit(dialStdio())
	}
	if os.Getenv(asCreator) != "" { // a test made this binary an executor that it kills
		os.Exit(createForever())
	}
	var err error
	if scratch, err = os.MkdirTemp("", "spool-docker-"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := leftovers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if err := os.RemoveAll(scratch); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

// withRequired returns cfg with every required setting that a test does not name, except Engine and Runner.
func withRequired(cfg Config) Config {
	cfg.Limits = overlayLimits(sandbox.Limits{MemoryBytes: 2 << 30, CPUs: 2, PIDs: 512, DiskBytes: 10 << 30}, cfg.Limits)
	cfg.TmpBytes, cfg.Files, cfg.DiskLimit = cmp.Or(cfg.TmpBytes, 512<<20), cmp.Or(cfg.Files, 1_000_000), cmp.Or(cfg.DiskLimit, DiskLimitAuto)
	cfg.Users = cmp.Or(cfg.Users, UserRange{First: 70000, Last: 99999})
	l := &cfg.Layers
	l.Within, l.MaxBytes, l.Keep = cmp.Or(l.Within, 10*time.Minute), cmp.Or(l.MaxBytes, 2<<30), cmp.Or(l.Keep, 7*24*time.Hour)
	return cfg
}

// leftovers removes what is left on the engine, and returns an error if anything other than the runner's volume was
// left.
func leftovers() error {
	p, err := New(withRequired(Config{Engine: engine, Runner: "none"}))
	if err != nil {
		return err
	}
	defer p.Close() //nolint:errcheck // the process ends
	ctx := context.Background()
	if _, err := p.api.Ping(ctx); err != nil {
		return nil // no engine, nothing left
	}
	ours := filters.NewArgs(filters.Arg("label", labelEngine))
	var problems []error
	// The runner's volume is meant to stay.
	if path, err := runners(); err == nil {
		_, sum, err := copyWithDigest(path, io.Discard)
		_, rerr := p.removeVolume(ctx, (&runnerBinary{digest: sum}).volumeName())
		problems = append(problems, err, rerr)
	}
	// And so are those of skills, one for each engine.
	shelves, err := p.api.VolumeList(ctx, volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", labelSkills))})
	problems = append(problems, err)
	for _, v := range shelves.Volumes {
		if strings.HasPrefix(v.Labels[labelSkills], engine) {
			_, err := p.removeVolume(ctx, v.Name)
			problems = append(problems, err)
		}
	}
	containers, err := p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: ours})
	problems = append(problems, err)
	containers = slices.DeleteFunc(containers, func(c container.Summary) bool { return !strings.HasPrefix(c.Labels[labelEngine], engine) })
	for _, c := range containers {
		problems = append(problems, fmt.Errorf("container %v was left behind", c.Names), p.removeContainer(ctx, c.ID))
	}
	volumes, err := p.api.VolumeList(ctx, volume.ListOptions{Filters: ours})
	problems = append(problems, err)
	volumes.Volumes = slices.DeleteFunc(volumes.Volumes, func(v *volume.Volume) bool { return !strings.HasPrefix(v.Labels[labelEngine], engine) })
	for _, v := range volumes.Volumes {
		problems = append(problems, fmt.Errorf("volume %s was left behind", v.Name), p.api.VolumeRemove(ctx, v.Name, false))
	}
	return errors.Join(problems...)
}

func buildRunner() (string, error) {
	path := filepath.Join(scratch, "runner")
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", path, "./runner")
	cmd.Dir = filepath.Join("..", "..", "..", "..", "cmd") // a module of its own, which no service imports
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
}

// chooseDiskLimit returns the mode by which the engine of the tests enforces disk limits.
func chooseDiskLimit() (string, error) {
	path, err := runners()
	if err != nil {
		return "", err
	}
	p, err := New(withRequired(Config{Engine: engine, Runner: path, Image: testImage}))
	if err != nil {
		return "", err
	}
	limit, err := p.ChooseDiskLimit(context.Background())
	return limit, errors.Join(err, p.Close())
}

// needEngine returns a config for the engine. It skips the test if none answers.
func needEngine(t testing.TB) Config {
	t.Helper()
	p, err := New(withRequired(Config{Engine: engine, Runner: "none"}))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // only idle connections
	if _, err := p.api.Ping(t.Context()); err != nil {
		t.Skipf("no Docker engine answers (scripts/engine start brings one up): %v", err)
	}
	path, err := runners()
	if err != nil {
		t.Fatal(err)
	}
	images, err := imagepolicy.Parse("images", []string{"*"})
	if err != nil {
		t.Fatal(err)
	}
	limit, err := diskLimit()
	if err != nil {
		t.Fatal(err)
	}
	return Config{DiskLimit: limit, Engine: engine, Runner: path, Image: testImage, Images: images, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
}

func provide(t testing.TB, cfg Config) *Provider {
	t.Helper()
	p, err := New(withRequired(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func newID(t testing.TB, k events.IDKind) string {
	t.Helper()
	id, err := events.NewID(k, time.Now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func newSpec(t testing.TB) sandbox.Spec {
	t.Helper()
	return sandbox.Spec{ID: newID(t, events.KindSandbox), Labels: sandbox.Labels{
		Tenant: "default", Session: newID(t, events.KindSession), Engine: engine, Epoch: 1,
	}}
}

// create creates a sandbox that ends with the test.
func create(t testing.TB, p *Provider, spec sandbox.Spec) *box {
	t.Helper()
	t.Cleanup(func() {
		if err := p.Terminate(context.Background(), spec.ID, true); err != nil {
			t.Error(err)
		}
	})
	b, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return b.(*box)
}

// sh runs a shell line until it ends.
func sh(t testing.TB, b sandbox.Sandbox, line string) (stdout, stderr string, code int) {
	t.Helper()
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", line}})
	if err != nil {
		t.Fatal(err)
	}
	if err := proc.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(proc.Stdout())
	errs, err2 := io.ReadAll(proc.Stderr())
	code, err3 := proc.Wait()
	if err := errors.Join(err, err2, err3); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)), strings.TrimSpace(string(errs)), code
}

func TestProvider(t *testing.T) {
	cfg := needEngine(t)
	sandboxtest.Exercise(t, sandboxtest.TestedProvider{
		New:        func(t testing.TB) sandbox.Provider { return provide(t, cfg) },
		Engine:     engine,
		KillRunner: func(t testing.TB, id string) { killRunner(t, provide(t, cfg), id) },
	})
}

// killRunner kills a sandbox's container.
func killRunner(t testing.TB, p *Provider, id string) {
	t.Helper()
	c, err := p.findSandbox(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	gone, errs := p.api.ContainerWait(t.Context(), c.container, container.WaitConditionNotRunning)
	if err := p.api.ContainerKill(t.Context(), c.container, "KILL"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
	case err := <-errs:
		t.Fatal(err)
	}
}

// drain reads and drops everything, and closes.
func drain(r io.ReadCloser) error {
	_, err := io.Copy(io.Discard, r)
	return errors.Join(err, r.Close())
}
