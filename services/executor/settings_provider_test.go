package executor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/docker"
	"github.com/spoolhq/spool/services/executor/internal/local"
)

// Local sandboxes and the engine's name are stored in the folder, which is created.
func TestSettingDataDir(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "below", "here")
	c, err := Config{DataDir: dir}.withDataFolder()
	if err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile(filepath.Join(dir, "engine"))
	if err != nil || strings.TrimSpace(string(kept)) != c.Engine || c.Engine == "" {
		t.Errorf("engine %q is kept as %q, %v", c.Engine, kept, err)
	}
	if e := (&Executor{cfg: c}); e.WorkspacesDir() != filepath.Join(dir, "workspaces") {
		t.Errorf("workspaces are in %s", e.WorkspacesDir())
	}
}

// SPOOL_SANDBOX selects the provider.
func TestSettingSandbox(t *testing.T) {
	t.Parallel()
	provider := func(kind string) sandbox.Provider {
		c, err := Config{Sandbox: kind, DataDir: t.TempDir(), Engine: "e", Runner: "/runner"}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.newProvider(slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p, ok := provider(ProviderLocal).(*local.Provider); !ok {
		t.Errorf("local gives %T", p)
	}
	p, ok := provider(ProviderDocker).(*docker.Provider)
	if !ok {
		t.Fatalf("docker gives %T", p)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := (Config{Sandbox: "moon"}).withDefaults(); err == nil || !strings.Contains(err.Error(), "sandbox:") {
		t.Errorf("another is taken: %v", err)
	}
}

// SPOOL_EGRESS_ADMIN is the proxy's admin socket. Without it the executor asks no proxy.
func TestSettingEgressAdmin(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "adm") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "admin.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		if c, err := l.Accept(); err == nil {
			_ = c.Close() // a connection proves that the socket is used
		}
	}()
	deps := Deps{NATS: natstest.Conn(t, natstest.Run(t)), Log: newMemlog(t), Logger: slog.New(slog.DiscardHandler)}
	cfg := Config{Sandbox: ProviderDocker, Engine: "e", Runner: t.TempDir(), EgressAdmin: socket, EgressSockets: "sockets"}
	e, err := newExecutor(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.deps.Egress.OpenModelRequests(t.Context(), "x"); err == nil {
		t.Error("a proxy that says nothing answered")
	}
	<-asked
	cfg.EgressAdmin, cfg.EgressSockets = "", ""
	if e, err = newExecutor(cfg, deps); err != nil || e.deps.Egress != nil {
		t.Errorf("without it: %v, %v", e.deps.Egress, err)
	}
}

// SPOOL_EGRESS_SERVER and SPOOL_EGRESS_AUTHORITY configure how Modal sandboxes reach the proxy. Both are required, and
// other providers refuse them.
func TestSettingEgressServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	if err == nil {
		err = authority.WriteTrustFile(filepath.Join(dir, "ca.pem"))
	}
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	good := Config{Sandbox: ProviderModal, EgressServer: "Proxy.example.com:7443", EgressAuthority: filepath.Join(dir, "ca.pem"), EgressAdmin: "/run/spool/admin/egress.sock"}
	if err := good.checkEgressSettings(); err != nil {
		t.Fatal(err)
	}
	if got, err := good.remoteEgress(); err != nil || got != (remoteEgress{"proxy.example.com:7443", string(text)}) {
		t.Errorf("%+v, %v", got, err)
	}
	for says, change := range map[string]func(*Config){
		"egress-server: it is empty":                            func(c *Config) { c.EgressServer = "" },
		"egress-server: it is not a host and a port":            func(c *Config) { c.EgressServer = "proxy.example.com" },
		"egress-server: it is not a host and a port like":       func(c *Config) { c.EgressServer = "https://proxy.example.com:7443" },
		"egress-server: no sandbox can connect to 0.0.0.0:7443": func(c *Config) { c.EgressServer = "0.0.0.0:7443" },
		"egress-authority: it is empty":                         func(c *Config) { c.EgressAuthority = "" },
		"egress-authority: open " + dir + "/none":               func(c *Config) { c.EgressAuthority = filepath.Join(dir, "none") },
		"has no certificate in PEM form":                        func(c *Config) { c.EgressAuthority = filepath.Join(dir, "authority", certificate.KeyFile) },
		"egress-admin: it is empty":                             func(c *Config) { c.EgressAdmin = "" },
		"egress-sockets, egress-image: they are for":            func(c *Config) { c.EgressSockets = "sockets" },
		"for sandbox modal, and sandbox is docker":              func(c *Config) { c.Sandbox, c.EgressSockets = ProviderDocker, "sockets" },
		"for sandbox modal, and sandbox is local":               func(c *Config) { c.Sandbox, c.EgressAdmin, c.EgressServer = ProviderLocal, "", "" },
	} {
		c := good
		change(&c)
		if _, err := c.withDefaults(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v\nwant %s", err, says)
		}
	}
}

// passage listens on a new socket, forwards to an engine, and counts connections.
func passage(t *testing.T, engine string) (host string, count *atomic.Int64) {
	t.Helper()
	dir, err := os.MkdirTemp("", "eng") //nolint:usetesting // short, as above
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "d.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close(); _ = os.RemoveAll(dir) })
	count = &atomic.Int64{}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			to, err := net.Dial("unix", strings.TrimPrefix(engine, "unix://"))
			if err != nil {
				_ = c.Close()
				continue
			}
			join := func(a, b net.Conn) {
				_, _ = io.Copy(a, b)
				_ = a.(*net.UnixConn).CloseWrite()
			}
			go join(c, to)
			go join(to, c)
		}
	}()
	return "unix://" + l.Addr().String(), count
}

// needDocker returns a client of the engine. Without an engine it skips the test.
func needDocker(t *testing.T) *client.Client {
	t.Helper()
	api, err := client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Close() }) // after other cleanups that use the client
	if _, err := api.Ping(t.Context()); err != nil || !strings.HasPrefix(api.DaemonHost(), "unix://") {
		t.Skipf("no Docker engine answers on a Unix socket (scripts/engine start brings one up): %v", err)
	}
	return api
}

// builtRunner returns the path of a runner for this machine.
func builtRunner(t *testing.T) string {
	t.Helper()
	runner := filepath.Join(t.TempDir(), "runner")
	built := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-s -w", "-o", runner, "./runner")
	built.Dir, built.Env = filepath.Join("..", "..", "cmd"), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := built.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return runner
}

func newMemlog(t *testing.T) *memlog.Log {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return log
}

// Sandboxes have the properties that the settings of Docker sandboxes name, on the configured engine.
func TestSettingDocker(t *testing.T) {
	api := needDocker(t)
	host, came := passage(t, api.DaemonHost())
	runner := builtRunner(t)
	engine, sockets := "test-"+strings.ToLower(rand.Text()[:12]), t.TempDir()
	cfg := Config{
		Sandbox: ProviderDocker, Engine: engine, Runner: runner, DockerHost: host, ImageSettings: imagepolicy.ImageSettings{SandboxImage: "debian:bookworm-slim"}, EgressSockets: sockets, EgressAdmin: "x", DiskLimit: docker.DiskLimitWatch,
		SandboxMemory: 256 << 20, SandboxCPUs: 0.5, SandboxPIDs: 99, SandboxDisk: 123_456_789, SandboxTmp: 7 << 20, SandboxUIDs: "31000-31000",
	}
	t.Cleanup(func() { // after the sandboxes, which have it
		if err := api.VolumeRemove(context.Background(), docker.SkillsVolume(engine), true); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	create := func(cfg Config, image string) (string, error) {
		cfg, err := cfg.withDefaults()
		if err != nil {
			return "", err
		}
		p, err := cfg.newProvider(slog.New(slog.DiscardHandler))
		if err != nil {
			return "", err
		}
		id, err := events.NewID(events.KindSandbox, time.Now(), rand.Reader)
		if err != nil {
			return "", err
		}
		t.Cleanup(func() {
			if err := errors.Join(p.Terminate(context.Background(), id, true), p.(*docker.Provider).Close()); err != nil {
				t.Error(err)
			}
		})
		_, err = p.Create(ctx, sandbox.Spec{ID: id, Image: image, Labels: sandbox.Labels{Tenant: "default", Session: events.DeriveID(events.KindSession, id), Engine: cfg.Engine, Epoch: 1}})
		return id, err
	}
	id, err := create(cfg, "")
	if err != nil {
		t.Fatal(err)
	}
	if came.Load() == 0 {
		t.Error("no connection used DockerHost")
	}
	list, err := api.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", "dev.spool.engine="+engine))})
	if err != nil || len(list) != 1 {
		t.Fatalf("%d containers of %s, %v", len(list), id, err)
	}
	made, err := api.ContainerInspect(ctx, list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	h := made.HostConfig
	for what, pair := range map[string][2]any{
		"SandboxImage":  {made.Config.Image, "debian:bookworm-slim"},
		"SandboxMemory": {h.Memory, int64(256 << 20)},
		"SandboxCPUs":   {h.NanoCPUs, int64(5e8)},
		"SandboxPIDs":   {*h.PidsLimit, int64(99)},
		"SandboxDisk":   {slices.Contains(made.Config.Env, "SPOOL_RUNNER_DISK_LIMIT=123456789"), true},
		"SandboxUIDs":   {made.Config.User, "31000:31000"},
		"SandboxTmp":    {strings.Contains(h.Tmpfs["/tmp"], fmt.Sprintf("size=%d,", 7<<20)), true},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %v, want %v", what, pair[0], pair[1])
		}
	}
	mounted := false
	for _, m := range made.Mounts {
		mounted = mounted || m.Source == sockets && !m.RW
	}
	if !mounted {
		t.Errorf("EgressSockets: %s is not among %+v", sockets, made.Mounts)
	}
	// SandboxImages and PullImages: no registry listens on port 1, and the engine connects to none unless images are
	// pulled.
	for _, c := range []struct {
		images []string
		pull   bool
		says   string
	}{
		{nil, true, "the image is not one that this installation allows"},
		{[]string{"127.0.0.1:1/*"}, false, "is not on the engine: "},
		{[]string{"127.0.0.1:1/*"}, true, "cannot be pulled"},
	} {
		cfg := cfg
		cfg.SandboxImages, cfg.PullImages = c.images, c.pull
		if _, err := create(cfg, "127.0.0.1:1/x:1"); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("images %v, pull %t: %v", c.images, c.pull, err)
		}
	}
	// No engine has this runtime: the engine's error shows that the setting was passed on.
	cfg.SandboxRuntime, cfg.SandboxUIDs = "spool-no-such-runtime", ""
	if _, err := create(cfg, ""); err == nil || !strings.Contains(err.Error(), "spool-no-such-runtime") {
		t.Errorf("SandboxRuntime: %v", err)
	}
}

// A sandbox has the configured mode and number of files. A mode that the engine cannot enforce stops the executor.
func TestSettingDiskLimit(t *testing.T) {
	t.Parallel()
	engine := "test-" + strings.ToLower(rand.Text()[:12])
	cfg := Config{Sandbox: ProviderDocker, Engine: engine, Runner: builtRunner(t), ImageSettings: imagepolicy.ImageSettings{SandboxImage: "debian:bookworm-slim"}, SandboxFiles: 5000, EgressSockets: t.TempDir(), EgressAdmin: "x"}
	api := needDocker(t)
	t.Cleanup(func() { // after the sandboxes, which have it
		if err := api.VolumeRemove(context.Background(), docker.SkillsVolume(engine), true); err != nil {
			t.Error(err)
		}
	})
	log := slog.New(slog.DiscardHandler)
	if mode, err := cfg.ProveDiskLimit(t.Context(), log); mode != docker.DiskLimitLoop || err != nil {
		t.Fatalf("auto is %s, %v", mode, err)
	}
	left, err := api.VolumeList(t.Context(), volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", "dev.spool.engine=doctor"))})
	if err != nil || len(left.Volumes) > 0 {
		t.Errorf("the proof leaves %+v, %v", left.Volumes, err)
	}
	for mode, few := range map[string]bool{docker.DiskLimitLoop: true, docker.DiskLimitWatch: false} {
		cfg.DiskLimit = mode
		if got := inodes(t, cfg); (got >= 5000 && got < 8000) != few {
			t.Errorf("%s: a workspace may have %d files", mode, got)
		}
	}
	cfg.DiskLimit = docker.DiskLimitQuota
	if _, err := cfg.ProveDiskLimit(t.Context(), log); err == nil {
		t.Skip("the engine's file system has project quota: no mode fails")
	}
	e, err := newExecutor(cfg, Deps{NATS: natstest.Conn(t, natstest.Run(t)), Log: newMemlog(t), Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.chooseDiskLimit(t.Context()); err == nil || !strings.Contains(err.Error(), "SPOOL_SANDBOX_DISK_LIMIT") {
		t.Errorf("quota, which the engine has not: %v", err)
	}
	if err := e.closeConnections(); err != nil {
		t.Error(err)
	}
}

// inodes returns the number of files that the workspace of a new sandbox may have.
func inodes(t *testing.T, cfg Config) int {
	t.Helper()
	cfg, err := cfg.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p, err := cfg.newProvider(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	id, err := events.NewID(events.KindSandbox, time.Now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(p.Terminate(context.Background(), id, true), p.(*docker.Provider).Close()); err != nil {
			t.Error(err)
		}
	}()
	b, err := p.Create(t.Context(), sandbox.Spec{ID: id, Labels: sandbox.Labels{Tenant: "default", Session: events.DeriveID(events.KindSession, id), Engine: cfg.Engine, Epoch: 1}})
	if err != nil {
		t.Fatal(err)
	}
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"stat", "-f", "-c", "%c", "/workspace"}})
	if err != nil {
		t.Fatal(err)
	}
	_ = proc.Stdin().Close() // the command reads nothing
	out, err := io.ReadAll(proc.Stdout())
	_, werr := proc.Wait()
	n, perr := strconv.Atoi(strings.TrimSpace(string(out)))
	if err := errors.Join(err, werr, perr); err != nil {
		t.Fatal(err)
	}
	return n
}
