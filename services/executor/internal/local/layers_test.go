package local

import (
	"context"
	"errors"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/dependency/dependencytest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// layerBed returns the config of a provider, and a registry.
func layerBed(t *testing.T, script string) (Config, *dependencytest.Registry) {
	t.Helper()
	for _, args := range [][]string{{"npm", "--version"}, {"python3", "-m", "pip", "--version"}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("needs %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	var handler *dependencytest.Registry
	s := httptest.NewUnstartedServer(nil)
	base := "http://" + s.Listener.Addr().String()
	handler, err := dependencytest.New(base+"/npm", []dependencytest.NPMPackage{{
		Name: "greeter", Version: "1.2.3", Bin: map[string]string{"greet-npm": "cli.js"},
		Files:   map[string]string{"cli.js": "#!/usr/bin/env node\nconsole.log(require('greeter/word'))\n", "word.js": "module.exports = 'hello from npm'\n"},
		Scripts: map[string]string{"postinstall": script},
	}}, []dependencytest.PythonPackage{{Name: "greeting", Version: "0.1", Module: "def main():\n    print('hello from pip')\n", Programs: []string{"greet-pip"}}})
	if err != nil {
		t.Fatal(err)
	}
	s.Config.Handler = handler
	s.Start()
	t.Cleanup(s.Close)
	return Config{Dir: t.TempDir(), Runner: "/none", Engine: "e", Layers: layer.Config{NPMRegistry: base + "/npm", PIPIndexURL: base + "/pip"}}, handler
}

func packages(t *testing.T, d events.Dependencies) sandbox.LayerPackages {
	t.Helper()
	set, err := dependency.Parse(d)
	if err != nil {
		t.Fatal(err)
	}
	return sandbox.LayerPackages{PackageSet: set}
}

var both = events.Dependencies{NPM: []string{"greeter@1.2.3"}, PIP: []string{"greeting==0.1"}}

// An agent's dependencies are installed once with this machine's npm and pip, and sandboxes find them, without a
// registry from then on. Installers get no API keys.
func TestLayer(t *testing.T) {
	t.Setenv("ANTHROPIC_API_KEY", "sk-hunter2")
	t.Setenv("npm_config_cache", t.TempDir()) // each time anew
	cfg, registry := layerBed(t, "env > env.txt")
	var began atomic.Int32
	var all sync.WaitGroup
	for range 2 {
		p := newProvider(t, cfg) // another executor
		for range 2 {
			all.Go(func() {
				if _, err := p.Layer(t.Context(), packages(t, both), sandbox.LayerBuilder{Begun: func() { began.Add(1) }}); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	if registry.CountRequests(".tgz") != 1 || registry.CountRequests(".whl") != 1 || began.Load() != 4 {
		t.Errorf("%d and %d downloads, %d waited", registry.CountRequests(".tgz"), registry.CountRequests(".whl"), began.Load())
	}
	registry.SetAvailable(false)
	p := newProvider(t, cfg)
	dir, err := p.Layer(t.Context(), packages(t, both), sandbox.LayerBuilder{Begun: func() { t.Error("it is made again") }})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "node_modules", "greeter", "env.txt"))
	if err != nil || strings.Contains(string(raw), "hunter2") || !strings.Contains(string(raw), "PATH=") {
		t.Errorf("an installer sees %s, %v", raw, err)
	}
	b := p.newBox(savedSandbox{ID: "x", Layer: dir, Labels: sandbox.Labels{Session: "s"}})
	out, err := (&exec.Cmd{Path: "/bin/sh", Args: []string{"sh", "-c", "greet-npm && greet-pip && python3 -c 'import greeting; greeting.main()'"}, Env: b.environment()}).CombinedOutput()
	if want := "hello from npm\nhello from pip\nhello from pip\n"; string(out) != want || err != nil {
		t.Errorf("it says %s, %v", out, err)
	}
	if left, err := filepath.Glob(filepath.Join(cfg.Dir, "layers", "*.new-*")); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A version manager's shim is not used for the installation: if it is killed, its lock stays.
func TestLayerBypassesShim(t *testing.T) {
	t.Parallel()
	cfg, _ := layerBed(t, "true")
	real, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal(err)
	}
	shims := t.TempDir()
	shim := "#!/bin/sh\ncase \"$*\" in *'-m pip'*) echo 'the shim ran' >&2; exit 1;; esac\nexec " + real + " \"$@\"\n"
	if err := os.WriteFile(filepath.Join(shims, "python3"), []byte(shim), 0o700); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	cfg.Path = shims + ":" + os.Getenv("PATH")
	if _, err := newProvider(t, cfg).Layer(t.Context(), packages(t, events.Dependencies{PIP: both.PIP}), sandbox.LayerBuilder{}); err != nil {
		t.Error(err)
	}
}

// A failed installation returns the end of the installer's output, and leaves nothing.
func TestLayerFails(t *testing.T) {
	t.Parallel()
	cfg, _ := layerBed(t, "echo the script is unhappy; exit 3")
	for name, c := range map[string]struct {
		d      events.Dependencies
		change func(*Config)
		says   string
	}{
		"unknown to pip": {events.Dependencies{PIP: []string{"nowhere==1.0"}}, nil, "No matching distribution found for nowhere==1.0"},
		"unknown to npm": {events.Dependencies{NPM: []string{"nowhere@1.0.0"}}, nil, "nowhere"},
		"a script":       {events.Dependencies{NPM: both.NPM}, nil, "the script is unhappy"},
		"too slow":       {events.Dependencies{PIP: both.PIP}, func(c *Config) { c.Layers.Within = time.Millisecond }, "longer than 1ms"},
		"too large":      {events.Dependencies{PIP: both.PIP}, func(c *Config) { c.Layers.MaxBytes = 10 }, "more than 10 bytes"},
		"no npm":         {events.Dependencies{NPM: both.NPM}, func(c *Config) { c.Path = "/nowhere" }, "this machine has no node"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := cfg
			cfg.Dir = t.TempDir()
			if c.change != nil {
				c.change(&cfg)
			}
			_, err := newProvider(t, cfg).Layer(t.Context(), packages(t, c.d), sandbox.LayerBuilder{})
			var typed *sandbox.Error
			if !errors.As(err, &typed) || typed.Code != sandbox.CodeDependenciesFailed || !strings.Contains(typed.Message, c.says) {
				t.Errorf("%v, want %s", err, c.says)
			}
			if dirs, err := filepath.Glob(filepath.Join(cfg.Dir, "layers", "*[0-9a-z]")); err != nil || len(dirs) > 1 || len(dirs) == 1 && !strings.HasSuffix(dirs[0], ".lock") {
				t.Errorf("left: %v, %v", dirs, err)
			}
		})
	}
}

// An installation without a caller ends with all its processes.
func TestLayer_EndsWithItsLastCaller(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, _ := layerBed(t, "echo it runs > "+fifo+"; sleep 600")
	p := newProvider(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := p.Layer(ctx, packages(t, events.Dependencies{NPM: both.NPM}), sandbox.LayerBuilder{})
		done <- err
	}()
	if raw, err := os.ReadFile(fifo); err != nil || string(raw) != "it runs\n" { // once it does
		t.Fatalf("%s, %v", raw, err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(cfg.Dir, "layers", "*.new-*")); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Layers that were not used for long are removed; those that a sandbox uses, and those that are being created, stay.
func TestOrphans_RemovesUnusedLayers(t *testing.T) {
	t.Parallel()
	p := newProvider(t, Config{Dir: t.TempDir(), Runner: "/none", Engine: "e"})
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	digest := func(c string) string { return strings.Repeat(c, 64) }
	long := time.Now().Add(-8 * 24 * time.Hour)
	for c, last := range map[string]time.Time{"a": long, "b": time.Now(), "c": long, "d": long} {
		if err := os.MkdirAll(filepath.Join(p.layersDir(), digest(c)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(p.layerLockPath(digest(c)), nil, 0o600), os.Chtimes(p.layerLockPath(digest(c)), last, last)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(p.layersDir(), digest("a")+".new-x"), 0o700); err != nil {
		t.Fatal(err)
	}
	id := "sbx_119D2EWFRKKEB07X7DTDD0J410"
	if err := os.MkdirAll(p.sandboxDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeJSON(filepath.Join(p.sandboxDir(id), "sandbox.json"), savedSandbox{ID: id, Layer: filepath.Join(p.layersDir(), digest("c"))}); err != nil {
		t.Fatal(err)
	}
	unlock, err := p.lockLayer(t.Context(), digest("d"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unlock(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(p.layersDir())
	var names []string
	for _, e := range left {
		names = append(names, e.Name()[:1]+strings.TrimLeft(e.Name(), e.Name()[:1]))
	}
	if got := strings.Join(names, " "); got != "b b.lock c c.lock d d.lock" || err != nil {
		t.Errorf("left: %s, %v", got, err)
	}
	if dir, err := p.completeLayer(digest("c")); err != nil || dir == "" {
		t.Errorf("%q, %v", dir, err)
	}
	if info, err := os.Stat(p.layerLockPath(digest("c"))); err != nil || time.Since(info.ModTime()) > time.Hour {
		t.Errorf("its use is not noted: %v", err)
	}
}
