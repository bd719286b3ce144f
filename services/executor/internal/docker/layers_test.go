package docker

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/dependency/dependencytest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// greeter returns npm packages with a program, a module, a dependency and an installation script.
func greeter(script string) []dependencytest.NPMPackage {
	return []dependencytest.NPMPackage{
		{
			Name: "@spool/greeter", Version: "1.2.3", Bin: map[string]string{"greet-npm": "cli.js"}, Dependencies: map[string]string{"words": "^2.0.0"},
			Files: map[string]string{
				"cli.js":   "#!/usr/bin/env node\nconsole.log(require('./index.js'))\n",
				"index.js": "module.exports = require('words') + ' from npm'\n",
			},
			Scripts: map[string]string{"postinstall": script},
		},
		{Name: "words", Version: "2.0.1", Files: map[string]string{"index.js": "module.exports = 'hello'\n"}},
	}
}

func pythonic() []dependencytest.PythonPackage {
	return []dependencytest.PythonPackage{{Name: "greeting", Version: "0.1", Module: "WORD = 'hello from pip'\ndef main():\n    print(WORD)\n", Programs: []string{"greet-pip"}, Extras: []string{"loud"}}}
}

var both = events.Dependencies{NPM: []string{"@spool/greeter@1.2.3"}, PIP: []string{"greeting[loud]==0.1"}}

// An agent's dependencies are installed once, by the first of several executors, and every sandbox with the layer sees
// them. No sandbox can change them, and no registry is needed any more.
func TestLayer(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("node -e 'require(\"fs\").writeFileSync(\"made.txt\", \"by a script\")'"), pythonic())
	var began atomic.Int32
	names := make([]string, 6)
	var all sync.WaitGroup
	for e := range 3 {
		p := provide(t, b.cfg) // another executor
		for i := range 2 {
			all.Go(func() {
				name, err := p.Layer(t.Context(), want(t, both), b.builder(p, func() { began.Add(1) }))
				if err != nil {
					t.Error(err)
				}
				names[2*e+i] = name
			})
		}
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	if n := b.registry.CountRequests(".tgz"); n != 2 || b.registry.CountRequests(".whl") != 1 || began.Load() != 6 || slices.ContainsFunc(names, func(n string) bool { return n != names[0] }) {
		t.Errorf("%d and %d downloads, %d waited, for %v", n, b.registry.CountRequests(".whl"), began.Load(), names)
	}
	b.registry.SetAvailable(false)
	p := provide(t, b.cfg)
	name, err := p.Layer(t.Context(), want(t, both), sandbox.LayerBuilder{Begun: func() { t.Error("it is made again") }})
	if err != nil || name != names[0] {
		t.Fatalf("without a registry: %q, %v", name, err)
	}
	spec := specOf(t, p)
	spec.Layer = name
	box := create(t, p, spec)
	for line, says := range map[string]string{
		"greet-npm":                             "hello from npm",
		"greet-pip":                             "hello from pip",
		"node -p 'require(\"@spool/greeter\")'": "hello from npm",
		"python3 -c 'import greeting; print(greeting.WORD)'": "hello from pip",
		"bash -lc 'greet-npm; greet-pip'":                    "hello from npm\nhello from pip",
		"cat $NODE_PATH/@spool/greeter/made.txt":             "by a script",
		"echo x > $NODE_PATH/x":                              "Read-only file system",
		"rm $PYTHONPATH/greeting.py":                         "Read-only file system",
		"touch /opt/spool/dependencies/x":                    "Read-only file system",
		"echo 'import g from \"@spool/greeter\"; console.log(g)' > /workspace/m.mjs && node /workspace/m.mjs": "hello from npm",
	} {
		out, errs, _ := sh(t, box, line)
		if !strings.Contains(out+errs, says) {
			t.Errorf("%s says %q and %q, want %q", line, out, errs, says)
		}
	}
	if out, _, code := sh(t, create(t, p, specOf(t, p)), "greet-npm; ls /opt/spool"); code == 0 {
		t.Errorf("a sandbox without a layer has one: %s", out)
	}
}

// The installation reaches the registry and no other host, cannot gain privileges, and leaves only the layer.
func TestLayerBuilderIsHardened(t *testing.T) {
	t.Parallel()
	// Only the builder's user may read the file until the layer is complete.
	script := `umask 077; (echo "uid $(id -u)"; grep -E 'CapEff|NoNewPrivs' /proc/self/status; touch /usr/x 2>&1; env | grep -c ^SPOOL_RUNNER; ` +
		`curl -sS -o /dev/null -w 'elsewhere %{http_code}\n' http://` + otherHost + `/ 2>&1; curl -sS -o /dev/null -w 'model %{http_code}\n' http://127.0.0.1:7070/anthropic/v1/models 2>&1; ` +
		`curl --noproxy '*' -sS -m 5 http://1.1.1.1/ 2>&1; cat /sys/class/net/*/address | wc -l; sleep 1000 >/dev/null 2>&1 & ) > found.txt`
	b := newLayerBed(t, greeter(script), nil)
	p := provide(t, b.cfg)
	name, err := p.Layer(t.Context(), want(t, events.Dependencies{NPM: both.NPM}), b.builder(p, nil))
	if err != nil {
		t.Fatal(err)
	}
	spec := specOf(t, p)
	spec.Layer = name
	out, _, _ := sh(t, create(t, p, spec), "cat $NODE_PATH/@spool/greeter/found.txt")
	for _, says := range []string{"uid ", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "touch: cannot touch '/usr/x': Read-only file system", "\n0\nelsewhere 403", "model 403", "curl: (7)", "\n1"} {
		if !strings.Contains(out, says) {
			t.Errorf("it does not say %q:\n%s", says, out)
		}
	}
	if n := b.other(); n != 0 {
		t.Errorf("the other host was reached %d times", n)
	}
	list, err := p.List(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != spec.ID {
		t.Errorf("sandboxes: %+v, %v", list, err)
	}
}

// A failed installation returns the end of the installer's output, and leaves no layer. Once it succeeds, the same
// layer is created.
func TestLayerFails(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("echo https://user:hunter2@example.com; echo the script is unhappy >&2; exit 3"), pythonic())
	for name, c := range map[string]struct {
		d      events.Dependencies
		change func(*Config)
		image  string
		says   []string
	}{
		"unknown to npm":   {d: events.Dependencies{NPM: []string{"nowhere@1.0.0"}}, says: []string{"npm ended with code 1", "nowhere"}},
		"another version":  {d: events.Dependencies{NPM: []string{"words@9.9.9"}}, says: []string{"npm ended with code 1", "No matching version"}},
		"unknown to pip":   {d: events.Dependencies{PIP: []string{"nowhere==1.0"}}, says: []string{"pip ended with code 1", "No matching distribution found for nowhere==1.0"}},
		"script":           {d: events.Dependencies{NPM: both.NPM}, says: []string{"npm ended with code 3", "the script is unhappy", "https://***@example.com"}},
		"without npm":      {d: events.Dependencies{NPM: []string{"words@2.0.1"}}, image: testImage, says: []string{"image " + testImage + " has no npm"}},
		"without pip":      {d: events.Dependencies{PIP: []string{"greeting==0.1"}}, image: testImage, says: []string{"image " + testImage + " has no pip"}},
		"too large":        {d: events.Dependencies{NPM: []string{"words@2.0.1"}}, change: func(c *Config) { c.Layers.MaxBytes = 4096 }, says: []string{"more than 4096 bytes", "SPOOL_DEPENDENCIES_SIZE"}},
		"too slow":         {d: events.Dependencies{NPM: []string{"words@2.0.1"}}, change: func(c *Config) { c.Layers.Within = 10 * time.Millisecond }, says: []string{"longer than 10ms", "SPOOL_DEPENDENCIES_TIMEOUT"}},
		"no such registry": {d: events.Dependencies{PIP: []string{"greeting==0.1"}}, change: func(c *Config) { c.Layers.PIPIndexURL = "http://" + otherHost + "/pip" }, says: []string{"pip ended with code 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := b.cfg
			if c.change != nil {
				c.change(&cfg)
			}
			p := provide(t, cfg)
			packages := want(t, c.d)
			packages.Image = c.image
			_, err := p.Layer(t.Context(), packages, b.builder(p, nil))
			var typed *sandbox.Error
			if !errors.As(err, &typed) || typed.Code != sandbox.CodeDependenciesFailed {
				t.Fatal(err)
			}
			for _, says := range c.says {
				if !strings.Contains(typed.Message, says) {
					t.Errorf("it does not say %q: %s", says, typed.Message)
				}
			}
			if strings.Contains(typed.Message, "hunter2") || len(typed.Message) > 3000 {
				t.Errorf("it says %s", typed.Message)
			}
		})
	}
	t.Cleanup(func() {
		if left := b.volumes(); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	})
}

// Without egress nothing can be installed, and the error does not blame the packages.
func TestLayer_WithoutEgress(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, nil, nil)
	_, err := provide(t, b.cfg).Layer(t.Context(), want(t, both), sandbox.LayerBuilder{})
	var typed *sandbox.Error
	if !errors.As(err, &typed) || typed.Code != sandbox.CodeDependenciesUnavailable {
		t.Error(err)
	}
}

// A caller whose context ends returns at once, and an installation without a caller ends.
func TestLayer_EndsWithItsLastCaller(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("sleep 600"), nil)
	p := provide(t, b.cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := p.Layer(ctx, want(t, events.Dependencies{NPM: both.NPM}), b.builder(p, nil))
		done <- err
	}()
	for b.registry.CountRequests(".tgz") < 2 { // until it has begun
		if t.Context().Err() != nil {
			t.Fatal(t.Context().Err())
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if list, err := p.List(t.Context()); len(list) > 0 || err != nil || len(b.volumes()) > 0 {
		t.Errorf("left: %+v and %v, %v", list, b.volumes(), err)
	}
}

// An abandoned lock is removed, and an incomplete layer under it does not count. While a sandbox fills a layer, callers
// wait.
func TestLayerLeftBehind(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("true"), nil)
	p := provide(t, b.cfg)
	p.stale = 300 * time.Millisecond
	packages := want(t, events.Dependencies{NPM: both.NPM})
	pic, err := p.lookUpAllowedImage(t.Context(), "", layerImage)
	if err != nil {
		t.Fatal(err)
	}
	digest := packages.LayerDigest(pic.id, pic.platform)
	lock, err := p.createHelper(t.Context(), p.layerNamePrefix(digest)+"-make", layerImage)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.discardHelper(context.Background(), lock) })
	// Half a layer, with a sandbox that fills it.
	half := p.layerVolumePrefix(digest) + "half"
	if err := p.createVolume(t.Context(), half, map[string]string{labelVersion: labelsVersion, labelRole: roleLayer, labelEngine: p.cfg.Engine, labelLayer: digest}); err != nil {
		t.Fatal(err)
	}
	spec := specOf(t, p)
	spec.LayerTarget = half
	create(t, p, spec)
	for range 2 {
		if _, err := p.removeAbandonedLock(t.Context(), digest, lock); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.api.ContainerInspect(t.Context(), lock); err != nil {
		t.Errorf("the lock was taken away, although a sandbox fills the layer: %v", err)
	}
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil { // as the sweep does
		t.Fatal(err)
	}
	name, err := p.Layer(t.Context(), packages, b.builder(p, nil))
	if err != nil || name == half {
		t.Errorf("%q, %v", name, err)
	}
}

// If two executors create the same layer, because one considered the other's lock abandoned, one layer counts.
func TestLayerMadeTwice(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("true"), nil)
	p := provide(t, b.cfg)
	packages := want(t, events.Dependencies{NPM: both.NPM})
	pic, err := p.lookUpAllowedImage(t.Context(), "", layerImage)
	if err != nil {
		t.Fatal(err)
	}
	digest := packages.LayerDigest(pic.id, pic.platform)
	quicker := p.layerVolumePrefix(digest) + "quicker"
	w := b.builder(p, nil)
	build := w.Build
	w.Build = func(ctx context.Context, spec sandbox.Spec, work func(context.Context, sandbox.Sandbox) error) error {
		err := p.createVolume(ctx, quicker, map[string]string{labelVersion: labelsVersion, labelRole: roleLayer, labelEngine: p.cfg.Engine, labelLayer: digest})
		if err == nil {
			_, err = p.publishLayer(ctx, digest, quicker)
		}
		return errors.Join(err, build(ctx, spec, work))
	}
	if name, err := p.Layer(t.Context(), packages, w); err != nil || name != quicker {
		t.Errorf("%q, %v", name, err)
	}
	if left := b.volumes(); len(left) != 3 || !slices.Contains(left, quicker) {
		t.Errorf("there are %v", left)
	}
}

// Unused layers are removed after their time; layers that a sandbox uses, or that were used since, stay. Volumes that
// never became a layer are removed as well.
func TestOrphans_RemovesUnusedLayers(t *testing.T) {
	t.Parallel()
	b := newLayerBed(t, greeter("true"), pythonic())
	p := provide(t, b.cfg)
	old, err := p.Layer(t.Context(), want(t, events.Dependencies{NPM: both.NPM}), b.builder(p, nil))
	used, uerr := p.Layer(t.Context(), want(t, events.Dependencies{PIP: both.PIP}), b.builder(p, nil))
	if err := errors.Join(err, uerr); err != nil {
		t.Fatal(err)
	}
	half := p.layerVolumePrefix(strings.Repeat("0", 64)) + "half"
	if err := p.createVolume(t.Context(), half, map[string]string{labelVersion: labelsVersion, labelRole: roleLayer, labelEngine: p.cfg.Engine, labelLayer: strings.Repeat("0", 64)}); err != nil {
		t.Fatal(err)
	}
	// A record of a layer that never existed.
	if err := p.recordLayerUse(t.Context(), strings.Repeat("0", 64)); err != nil {
		t.Fatal(err)
	}
	spec := specOf(t, p)
	spec.Layer = used
	create(t, p, spec)
	sweep := func(in time.Duration) []string {
		t.Helper()
		if err := p.removeOldLayers(t.Context(), time.Now().Add(in)); err != nil {
			t.Fatal(err)
		}
		return b.volumes()
	}
	if left := sweep(p.cfg.Layers.Within); len(left) != 8 {
		t.Errorf("at once there are left %v", left)
	}
	if left := sweep(p.cfg.Layers.Within + layerWaitMargin + time.Minute); slices.Contains(left, half) || len(left) != 7 {
		t.Errorf("after an installation's time there are left %v", left)
	}
	if left := sweep(p.cfg.Layers.Keep - time.Hour); !slices.Contains(left, old) || !slices.Contains(left, used) {
		t.Errorf("before their time there are left %v", left)
	}
	if left := sweep(p.cfg.Layers.Keep + time.Minute); slices.Contains(left, old) || !slices.Contains(left, used) || len(left) != 3 {
		t.Errorf("in the end there are left %v", left)
	}
	if again, err := p.Layer(t.Context(), want(t, events.Dependencies{NPM: both.NPM}), b.builder(p, nil)); err != nil || again == old {
		t.Errorf("again: %q, %v", again, err)
	}
}
