package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/dependency/dependencytest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// layerImage has npm and pip; scripts/images makes it.
const layerImage = "spool/sandbox:latest"

// Names of the simulated public network, and their public address.
const (
	registryHost = "packages.test"
	otherHost    = "elsewhere.test"
	publicIP     = "93.184.215.10"
)

// layerBed is an engine's name, an egress proxy for it, and a registry on a simulated public network. They are removed
// with the test.
type layerBed struct {
	t        testing.TB
	cfg      Config
	registry *dependencytest.Registry
	other    func() int // number of requests to the other host
	egress   *api.Client
	log      *logRecorder
}

func newLayerBed(t testing.TB, npm []dependencytest.NPMPackage, wheels []dependencytest.PythonPackage) *layerBed {
	t.Helper()
	b := &layerBed{t: t, cfg: needEngine(t), log: &logRecorder{}}
	p := provide(t, b.cfg)
	if _, err := p.api.ImageInspect(t.Context(), layerImage); err != nil {
		t.Skipf("needs the image %s (scripts/images): %v", layerImage, err)
	}
	var err error
	if b.registry, err = dependencytest.New("http://"+registryHost+"/npm", npm, wheels); err != nil {
		t.Fatal(err)
	}
	other, err := dependencytest.New("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	served := httptest.NewServer(b.registry)
	t.Cleanup(served.Close)
	elsewhere := httptest.NewServer(other)
	t.Cleanup(elsewhere.Close)
	b.other = func() int { return other.CountRequests("") }
	b.startEgress(map[string]string{registryHost: served.Listener.Addr().String(), otherHost: elsewhere.Listener.Addr().String()})
	b.cfg.Engine += "-" + strings.ToLower(rand.Text())
	b.cfg.Image = layerImage
	b.cfg.Logger = slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	b.cfg.Layers = layer.Config{NPMRegistry: "http://" + registryHost + "/npm", PIPIndexURL: "http://" + registryHost + "/pip", Within: 3 * time.Minute}
	t.Cleanup(func() {
		for _, v := range b.volumes() {
			if _, err := p.removeVolume(context.Background(), v); err != nil {
				t.Error(err)
			}
		}
	})
	return b
}

// hosts is a resolver of names that stand for servers of this machine.
type hosts map[string]netip.Addr

func (h hosts) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	if a, ok := h[strings.TrimSuffix(host, ".")]; ok {
		return []netip.Addr{a}, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

// startEgress runs the proxy, for which the names have public addresses.
func (b *layerBed) startEgress(servers map[string]string) {
	b.t.Helper()
	dir, err := os.MkdirTemp("", "egr") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // sandboxes run as another user
		b.t.Fatal(err)
	}
	names, at := hosts{}, map[string]string{}
	next := netip.MustParseAddr(publicIP)
	for name, server := range servers {
		names[name], at[netip.AddrPortFrom(next, 80).String()] = next, server
		next = next.Next()
	}
	cfg := egress.Config{ListenSandboxes: filepath.Join(dir, "s", "egress.sock"), ListenAdmin: filepath.Join(dir, "a", "egress.sock"), Data: filepath.Join(dir, "d"), Drain: time.Second}
	s, err := egress.New(cfg, egress.Deps{
		Logger: slog.New(slog.NewTextHandler(b.log, nil)), Resolver: names, Getenv: func(string) string { return "" },
		Own: func() ([]netip.Addr, error) { return nil, nil },
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if at[address] == "" {
				return nil, errors.New("nobody answers at " + address)
			}
			return (&net.Dialer{}).DialContext(ctx, network, at[address])
		},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	b.egress = api.NewClient(api.DialSocket(cfg.ListenAdmin))
	b.t.Cleanup(func() {
		b.egress.Close()
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
	})
	for deadline := time.Now().Add(20 * time.Second); ; {
		c, err := net.Dial("unix", cfg.ListenAdmin)
		if err == nil {
			c.Close()
			break
		}
		if time.Now().After(deadline) {
			b.t.Fatal(err)
		}
	}
	b.cfg.EgressSockets = filepath.Dir(cfg.ListenSandboxes)
}

// builder creates sandboxes for layers as the worker does.
func (b *layerBed) builder(p *Provider, begun func()) sandbox.LayerBuilder {
	return sandbox.LayerBuilder{Begun: begun, Build: func(ctx context.Context, spec sandbox.Spec, work func(context.Context, sandbox.Sandbox) error) (err error) {
		spec.ID, spec.EgressToken = newID(b.t, events.KindSandbox), rand.Text()
		spec.Labels = sandbox.Labels{Engine: p.cfg.Engine, Executor: newID(b.t, events.KindExecutor)}
		if _, err := b.egress.Register(ctx, spec.ID, api.Registration{Token: spec.EgressToken, Epoch: 1, Allow: []string{registryHost + ":80"}, Routes: &[]string{}}); err != nil {
			return err
		}
		defer func() {
			_, rerr := b.egress.Release(context.WithoutCancel(ctx), spec.ID)
			err = errors.Join(err, p.Terminate(context.WithoutCancel(ctx), spec.ID, true), rerr)
		}()
		box, err := p.Create(ctx, spec)
		if err != nil {
			return err
		}
		return work(ctx, box)
	}}
}

// volumes returns the volumes of layers on the engine.
func (b *layerBed) volumes() (names []string) {
	b.t.Helper()
	p := provide(b.t, b.cfg)
	list, err := p.api.VolumeList(context.Background(), volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", labelLayer), filters.Arg("label", labelEngine+"="+b.cfg.Engine))})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, v := range list.Volumes {
		names = append(names, v.Name)
	}
	return names
}

// want returns the packages for dependencies.
func want(t testing.TB, d events.Dependencies) sandbox.LayerPackages {
	t.Helper()
	set, err := dependency.Parse(d)
	if err != nil {
		t.Fatal(err)
	}
	return sandbox.LayerPackages{PackageSet: set}
}
