package modal

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/sandbox/sandboxtest"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

func TestProvider(t *testing.T) {
	s := sharedServer(t)
	cfg := s.config(t)
	sandboxtest.Exercise(t, sandboxtest.TestedProvider{
		Engine:         cfg.Engine,
		New:            func(t testing.TB) sandbox.Provider { return provide(t, cfg) },
		KillRunner:     func(t testing.TB, id string) { s.endSandbox(t, id, "preempted") },
		EndsWithRunner: true,
	})
}

func TestCreate_ByTwoExecutorsAtOnceIsOneSandbox(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg := s.config(t)
	spec := newSpec(t, cfg)
	var all sync.WaitGroup
	secrets, errs := make([]string, 3), make([]error, 3)
	for i := range secrets {
		p := provide(t, cfg)
		t.Cleanup(func() { _ = p.Terminate(context.Background(), spec.ID, true) })
		all.Go(func() {
			box, err := p.Create(t.Context(), spec)
			if errs[i] = err; err == nil {
				secrets[i] = box.Secret()
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if secrets[0] == "" || secrets[0] != secrets[1] || secrets[0] != secrets[2] {
		t.Errorf("the executors have the secrets %q", secrets)
	}
	if n := len(s.running(t, cfg.Engine)); n != 1 {
		t.Errorf("%d sandboxes run, want one", n)
	}
}

func TestPrepare_ByTwoExecutorsAtOnceIsOneImage(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	var all sync.WaitGroup
	images, errs := make([]preparedImage, 3), make([]error, 3)
	for i := range images {
		p := provide(t, cfg)
		all.Go(func() { images[i], errs[i] = p.prepareImage(t.Context(), testImage) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if images[0].image.ImageID != images[1].image.ImageID || images[0].image.ImageID != images[2].image.ImageID {
		t.Errorf("the executors have the images %v", images)
	}
	if n := s.calls(t, "TaskSnapshotFilesystem"); n != 1 {
		t.Errorf("%d images were prepared, want one", n)
	}
}

func TestPrepare_AfterLostAnswerUsesItsHelper(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	p := provide(t, cfg)
	s.ask(t, "POST", "/faults", map[string]any{"method": "SandboxCreateV2", "code": "UNAVAILABLE", "message": "injected", "count": 1, "after": true}, nil)
	create(t, p, newSpec(t, cfg))
	if n := s.calls(t, "SandboxGetFromNameV2"); n == 0 {
		t.Error("the helper was not looked for: no answer was lost")
	}
}

func TestCreate_AfterLostAnswerFindsTheSandbox(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	p := provide(t, cfg)
	if _, err := p.prepareImage(t.Context(), testImage); err != nil {
		t.Fatal(err)
	}
	s.ask(t, "POST", "/faults", map[string]any{"method": "SandboxCreateV2", "code": "UNAVAILABLE", "message": "injected", "count": 100, "after": true}, nil)
	spec := newSpec(t, cfg)
	_, err := p.Create(t.Context(), spec)
	if err != nil {
		wantCode(t, err, sandbox.CodeEngineUnavailable)
	}
	s.clear(t)
	create(t, p, spec)
	if n := len(s.running(t, cfg.Engine)); n != 1 {
		t.Errorf("%d sandboxes run, want one", n)
	}
}

func TestList_LeavesOutSandboxesOfOthersInTheApp(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg, other := s.config(t), s.config(t)
	other.App = cfg.App
	p, foreign := provide(t, cfg), provide(t, other)
	mine, theirs := newSpec(t, cfg), newSpec(t, other)
	create(t, p, mine)
	create(t, foreign, theirs)
	list, err := p.List(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != mine.ID {
		t.Errorf("listed: %+v, %v", list, err)
	}
	if _, err := p.Attach(t.Context(), theirs.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attach to a sandbox of another engine: %v", err)
	}
}

func TestTerminate_KeepsOrWipesTheWorkspace(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg := s.config(t)
	p := provide(t, cfg)
	snapshots := func(id string) bool {
		t.Helper()
		image, err := p.imageByName(t.Context(), workspaceImageName(id))
		if err != nil {
			t.Fatal(err)
		}
		return image != nil
	}
	first := newSpec(t, cfg)
	if err := create(t, p, first).Files().Put(t.Context(), "mark", strings.NewReader("1")); err != nil {
		t.Fatal(err)
	}
	if err := p.Terminate(t.Context(), first.ID, false); err != nil || !snapshots(first.ID) {
		t.Fatalf("no snapshot is kept: %v", err)
	}
	second := newSpec(t, cfg)
	second.Workspace = first.ID
	// Another executor has the sandbox start from it, and ends it.
	create(t, provide(t, cfg), second)
	if err := p.Terminate(t.Context(), second.ID, false); err != nil || !snapshots(second.ID) {
		t.Fatalf("no snapshot of the second sandbox is kept: %v", err)
	}
	if snapshots(first.ID) {
		t.Error("the first sandbox's snapshot outlives the sandbox that took it over")
	}
	if err := p.Terminate(t.Context(), second.ID, true); err != nil || snapshots(second.ID) {
		t.Errorf("a wiped workspace is there: %v", err)
	}
}

func TestSandbox_IsConfined(t *testing.T) {
	t.Parallel()
	cfg := sharedServer(t).config(t)
	box := create(t, provide(t, cfg), newSpec(t, cfg))
	for line, want := range map[string]string{
		"id -u": "10001\n", "id -G": "10001\n",
		"grep NoNewPrivs /proc/self/status | tr -d '\\t'": "NoNewPrivs:1\n",
		"grep CapEff /proc/self/status | tr -d '\\t'":     "CapEff:0000000000000000\n",
		`cd /proc; for p in [0-9]*; do if tr '\0' ' ' <$p/cmdline | grep -q '^/spool/bin/runner serve'; then grep Uid $p/status | tr -s '\t' ' '; fi; done 2>/dev/null`: "Uid: 10001 10001 10001 10001\n",
		"test -w /spool/bin/runner || test -w /bin/skills && echo writable":                                                                                             "",
		"pwd; cd /mnt/workspace && pwd -P":                        "/workspace\n/workspace\n",
		"cat /sys/class/net/*/operstate 2>/dev/null | grep -c up": "0\n",
	} {
		if got, _ := sh(t, box, line); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

func TestCreate_Refusals(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	good := s.config(t)
	refused := func(change func(*Config), spec func(*sandbox.Spec)) error {
		t.Helper()
		cfg := good
		if change != nil {
			change(&cfg)
		}
		p, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close() //nolint:errcheck // only connections
		sp := newSpec(t, cfg)
		if spec != nil {
			spec(&sp)
		}
		_, err = p.Create(t.Context(), sp)
		return err
	}
	wantCode(t, refused(func(c *Config) { c.Image = "spool.invalid/no-such-image:1" }, nil), sandbox.CodeImageNotFound)
	wantCode(t, refused(nil, func(sp *sandbox.Spec) { sp.Image = "debian:unstable" }), sandbox.CodeImageNotAllowed)
	wantCode(t, refused(func(c *Config) { c.Images, _ = imagepolicy.Parse("", []string{"*"}) }, func(sp *sandbox.Spec) { sp.Image = "spool.invalid/none:1" }), sandbox.CodeImageNotFound)
	wantCode(t, refused(func(c *Config) { c.TokenSecret = "wrong" }, nil), sandbox.CodeCredentialsRefused)
	wantCode(t, refused(func(c *Config) { c.Region = "atlantis-1" }, nil), sandbox.CodeRegionUnknown)
	wantCode(t, refused(func(c *Config) { c.Environment = "nowhere" }, nil), sandbox.CodeSandboxFailed)
	for name, spec := range map[string]func(*sandbox.Spec){
		"host path": func(sp *sandbox.Spec) { sp.HostPath = "/tmp" },
		"servers":   func(sp *sandbox.Spec) { sp.Servers = 1 },
		"layer":     func(sp *sandbox.Spec) { sp.Layer = "x" },
		"egress":    func(sp *sandbox.Spec) { sp.EgressToken = "x" },
		"engine":    func(sp *sandbox.Spec) { sp.Labels.Engine = "other" },
		"id":        func(sp *sandbox.Spec) { sp.ID = "../x" },
	} {
		if err := refused(nil, spec); err == nil || guest.IsUnavailable(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.fault(t, "SandboxCreateV2", "RESOURCE_EXHAUSTED", -1)
	wantCode(t, refused(nil, nil), sandbox.CodeQuotaExceeded)
	s.clear(t)
	s.fault(t, "SandboxCreateV2", "DEADLINE_EXCEEDED", -1)
	wantCode(t, refused(nil, nil), sandbox.CodeEngineUnavailable)
}

func TestSettings_ComeFromSpoolAlone(t *testing.T) {
	s := ownServer(t)
	cfg := s.config(t)
	home := t.TempDir()
	const file = "[default]\nactive = true\nserver_url = \"http://127.0.0.1:1\"\ntoken_id = \"x\"\ntoken_secret = \"y\"\nenvironment = \"nowhere\"\nsandbox_v2 = false\n"
	if err := os.WriteFile(filepath.Join(home, ".modal.toml"), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", home)
	for name, value := range map[string]string{
		"MODAL_SERVER_URL": "http://127.0.0.1:1", "MODAL_TOKEN_ID": "x", "MODAL_TOKEN_SECRET": "y", "MODAL_ENVIRONMENT": "nowhere",
		"MODAL_PROFILE": "other", "MODAL_SANDBOX_V2": "0", "MODAL_MAX_THROTTLE_WAIT": "0",
	} {
		t.Setenv(name, value)
	}
	create(t, provide(t, cfg), newSpec(t, cfg))
	if s.calls(t, "SandboxCreate") != 0 || s.calls(t, "SandboxCreateV2") == 0 {
		t.Error("MODAL_SANDBOX_V2 was read")
	}
	if os.Getenv("MODAL_PROFILE") != "other" {
		t.Error("the process's own variables were changed")
	}
}

func TestOutage_IsTypedAndEnds(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	p := provide(t, cfg)
	spec := newSpec(t, cfg)
	box := create(t, p, spec)
	proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"cat"}})
	if err != nil {
		t.Fatal(err)
	}
	s.outage(t, true)
	for name, f := range map[string]func() error{
		"create": func() error { _, err := p.Create(t.Context(), newSpec(t, cfg)); return err },
		"create again": func() error {
			q, err := New(cfg)
			if err != nil {
				return err
			}
			defer q.Close() //nolint:errcheck // only connections
			_, err = q.Create(t.Context(), spec)
			return err
		},
		"attach":    func() error { _, err := p.Attach(t.Context(), spec.ID); return err },
		"running":   func() error { _, err := box.Running(t.Context()); return err },
		"list":      func() error { _, err := p.List(t.Context()); return err },
		"adopt":     func() error { return p.Adopt(t.Context(), spec.ID, spec.Labels) },
		"terminate": func() error { return p.Terminate(t.Context(), spec.ID, false) },
		"exec": func() error {
			_, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"true"}})
			return err
		},
		"put":    func() error { return box.Files().Put(t.Context(), "x", strings.NewReader("x")) },
		"stdout": func() error { _, err := io.ReadAll(proc.Stdout()); return err },
		"wait":   func() error { _, err := proc.Wait(); return err },
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, f(), sandbox.CodeEngineUnavailable) })
	}
	s.outage(t, false)
	if out, code := sh(t, box, "echo back"); out != "back\n" || code != 0 {
		t.Errorf("after the outage: %q, code %d", out, code)
	}
	if _, err := p.List(t.Context()); err != nil {
		t.Errorf("list after the outage: %v", err)
	}
}

func TestPreemption_EndsProcessesAndTheSandbox(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg := s.config(t)
	p := provide(t, cfg)
	for _, how := range []string{"preempted", "timeout", "oom"} {
		spec := newSpec(t, cfg)
		box := create(t, p, spec)
		proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", "echo up; sleep 1000"}})
		if err != nil {
			t.Fatal(err)
		}
		up := make([]byte, 3)
		if _, err := io.ReadFull(proc.Stdout(), up); err != nil {
			t.Fatal(err)
		}
		s.endSandbox(t, spec.ID, how)
		if rest, err := io.ReadAll(proc.Stdout()); len(rest) > 0 || err != nil {
			t.Errorf("%s: stdout ends with %q, %v", how, rest, err)
		}
		if code, err := proc.Wait(); code != -1 || err != nil {
			t.Errorf("%s: code %d, %v", how, code, err)
		}
		if _, err := proc.Stdin().Write([]byte("x")); err == nil {
			t.Errorf("%s: stdin of a command that is gone takes a write", how)
		}
		for name, q := range map[string]*Provider{"the same executor": p, "another executor": provide(t, cfg)} {
			if _, err := q.Attach(t.Context(), spec.ID); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("%s: attach by %s: %v", how, name, err)
			}
		}
		if alive, err := box.Running(t.Context()); alive || err != nil {
			t.Errorf("%s: runs: %v, %v", how, alive, err)
		}
		if _, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"true"}}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%s: exec: %v", how, err)
		}
		// The next sandbox of the session has no workspace from this one.
		next := newSpec(t, cfg)
		next.Workspace = spec.ID
		if err := p.Terminate(t.Context(), spec.ID, false); err != nil {
			t.Errorf("%s: terminate: %v", how, err)
		}
		if r := create(t, p, next).(sandbox.WorkspaceReporter); r.HasWorkspace() {
			t.Errorf("%s: a workspace was kept", how)
		}
	}
}

func TestStdin_ArrivesInOrderOverASlowAndFaultyConnection(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	box := create(t, provide(t, cfg), newSpec(t, cfg))
	s.ask(t, "POST", "/latency", map[string]any{"oneWayMs": 25}, nil)
	proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"sha256sum"}})
	if err != nil {
		t.Fatal(err)
	}
	before := s.calls(t, "TaskExecStdinWrite")
	s.fault(t, "TaskExecStdinWrite", "UNAVAILABLE", 3)
	s.ask(t, "POST", "/faults", map[string]any{"method": "TaskExecStdinWrite", "code": "UNAVAILABLE", "message": "injected", "count": 3, "after": true}, nil)
	var content bytes.Buffer
	for i := 0; content.Len() < 10<<20; i++ {
		line := fmt.Sprintf("%d: %s\n", i, strings.Repeat("x", i%300))
		content.WriteString(line)
		if _, err := io.WriteString(proc.Stdin(), line); err != nil {
			t.Fatal(err)
		}
	}
	if err := proc.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(proc.Stdout())
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%x  -\n", sha256.Sum256(content.Bytes())); string(got) != want {
		t.Errorf("the command read what has the digest %q, want %q", got, want)
	}
	if n := s.calls(t, "TaskExecStdinWrite") - before; n > 100 {
		t.Errorf("%d calls for 10 MiB: small writes were sent one by one", n)
	}
}

func TestStdout_IsCompleteAcrossABrokenConnection(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	cfg := s.config(t)
	box := create(t, provide(t, cfg), newSpec(t, cfg))
	proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); [ $((i%100)) -ne 0 ] || sleep 0.1; done"}})
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 10)
	if _, err := io.ReadFull(proc.Stdout(), first); err != nil {
		t.Fatal(err)
	}
	s.outage(t, true)
	time.Sleep(300 * time.Millisecond) // while the command prints
	s.outage(t, false)
	rest, err := io.ReadAll(proc.Stdout())
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	if got := string(first) + string(rest); got != want.String() {
		t.Errorf("%d bytes came, want %d", len(got), want.Len())
	}
	if code, err := proc.Wait(); code != 0 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
}

func TestCheck_NamesTheSetting(t *testing.T) {
	t.Parallel()
	good := Config{TokenID: "ak-1", TokenSecret: "as-1", App: "spool", Image: "x", Engine: "e", Runner: "r", Timeout: MaxTimeout}
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for setting, change := range map[string]func(*Config){
		"modal-token-id":     func(c *Config) { c.TokenID = "" },
		"modal-token-secret": func(c *Config) { c.TokenSecret = "" },
		"modal-app":          func(c *Config) { c.App = "a/b" },
		"modal-image":        func(c *Config) { c.Image = "" },
		"modal-environment":  func(c *Config) { c.Environment = "-x" },
		"modal-region":       func(c *Config) { c.Region = "US East" },
		"modal-timeout":      func(c *Config) { c.Timeout = 25 * time.Hour },
		"modal-server-url":   func(c *Config) { c.ServerURL = "api.modal.com" },
		"egress-server":      func(c *Config) { c.Egress.Server = "proxy.example.com:7443" },
	} {
		cfg := good
		change(&cfg)
		if err := cfg.Check(); err == nil || !strings.HasPrefix(err.Error(), setting+": ") {
			t.Errorf("%s: %v", setting, err)
		}
	}
}

func TestTags_SurviveARoundTrip(t *testing.T) {
	t.Parallel()
	p := &Provider{cfg: Config{Engine: "e"}}
	for _, l := range []sandbox.Labels{
		{Engine: "e"}, {Engine: "e", Executor: newID(t, events.KindExecutor)},
		{Engine: "e", Tenant: "none", Session: newID(t, events.KindSession), Epoch: 1 << 63},
	} {
		tags := p.sandboxTags("sbx", l, &sandboxHandle{})
		for name, v := range tags {
			if v == "" {
				t.Errorf("tag %s is empty", name)
			}
		}
		if got, err := labelsOfTags(tags); got != l || err != nil {
			t.Errorf("%+v came back as %+v, %v", l, got, err)
		}
	}
}

func TestCreate_TellsModalTheLimits(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg := s.config(t)
	cfg.Timeout, cfg.Region = 20*time.Minute, region
	create(t, provide(t, cfg), newSpec(t, cfg))
	got := s.running(t, cfg.Engine)
	if len(got) != 1 {
		t.Fatalf("%d sandboxes run", len(got))
	}
	l := got[0]
	if l.Timeout != 1200 || l.Resources.MilliCPU != 1000 || l.Resources.MilliCPUMax != 1000 || l.Resources.MemoryMB != 512 || l.Resources.MemoryMBMax != 512 ||
		len(l.Regions) != 1 || l.Regions[0] != region || l.Network.Type != "BLOCKED" {
		t.Errorf("the server has %+v", l)
	}
}

func TestVerify_ReturnsTheCodeOfAWrongSetting(t *testing.T) {
	t.Parallel()
	good := sharedServer(t).config(t)
	if err := provide(t, good).VerifySettings(t.Context()); err != nil {
		t.Error(err)
	}
	for code, change := range map[string]func(*Config){
		sandbox.CodeCredentialsRefused: func(c *Config) { c.TokenID = "ak-other" },
		sandbox.CodeSandboxFailed:      func(c *Config) { c.Environment = "nowhere" },
		sandbox.CodeEngineUnavailable:  func(c *Config) { c.ServerURL = "http://127.0.0.1:1" },
	} {
		cfg := good
		change(&cfg)
		wantCode(t, provide(t, cfg).VerifySettings(t.Context()), code)
	}
}

func TestProve_StartsAndEndsASandbox(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	for _, where := range []string{"", region} {
		cfg := s.config(t)
		cfg.Region = where
		found, err := provide(t, cfg).ProveSettings(t.Context())
		if err != nil || len(found) != 3 || !strings.Contains(found[0], "accepts the token") || !strings.Contains(found[1], testImage) || !strings.Contains(found[2], "any region") == (where == "") {
			t.Errorf("%q, %v", found, err)
		}
		if left := s.running(t, cfg.Engine); len(left) != 0 {
			t.Errorf("left on the server: %+v", left)
		}
	}
}

func TestProve_NamesTheWrongSetting(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	web := httptest.NewUnstartedServer(http.NotFoundHandler())
	web.Config.Protocols = new(http.Protocols)
	web.Config.Protocols.SetUnencryptedHTTP2(true)
	web.Start()
	defer web.Close()
	for name, c := range map[string]struct {
		change  func(*Config)
		code    string
		setting string
	}{
		"a token that Modal refuses": {func(c *Config) { c.TokenSecret = "as-other" }, sandbox.CodeCredentialsRefused, "SPOOL_MODAL_TOKEN_SECRET"},
		"no such environment":        {func(c *Config) { c.Environment = "nowhere" }, sandbox.CodeSandboxFailed, "SPOOL_MODAL_ENVIRONMENT"},
		"no server":                  {func(c *Config) { c.ServerURL = "http://127.0.0.1:1" }, sandbox.CodeEngineUnavailable, "SPOOL_MODAL_SERVER_URL"},
		"another server":             {func(c *Config) { c.ServerURL = web.URL }, sandbox.CodeSandboxFailed, "SPOOL_MODAL_SERVER_URL"},
		"no such image":              {func(c *Config) { c.Image = "spool.invalid/none:1" }, sandbox.CodeImageNotFound, "SPOOL_MODAL_IMAGE"},
		"no such region":             {func(c *Config) { c.Region = "atlantis-1" }, sandbox.CodeRegionUnknown, "SPOOL_MODAL_REGION"},
	} {
		cfg := s.config(t)
		c.change(&cfg)
		_, err := provide(t, cfg).ProveSettings(t.Context())
		wantCode(t, err, c.code)
		if err == nil || !strings.Contains(err.Error(), c.setting) {
			t.Errorf("%s: %v, want an error that names %s", name, err, c.setting)
		}
		if left := s.running(t, cfg.Engine); len(left) != 0 {
			t.Errorf("%s: left on the server: %+v", name, left)
		}
	}
}

// A sandbox with a token reaches the egress proxy's address and no other.
func TestNetwork_ReachesTheProxyAlone(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	proxy, err := net.Listen("tcp", net.JoinHostPort(s.Gateway, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close() //nolint:errcheck // the test ends
	elsewhere := otherAddress(t, s.Gateway)
	other, err := net.Listen("tcp", net.JoinHostPort(elsewhere, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close() //nolint:errcheck // the test ends
	cfg := s.config(t)
	cfg.Egress.Server, cfg.Egress.Authority = proxy.Addr().String(), authority(t)
	spec := newSpec(t, cfg)
	spec.EgressToken = "token-of-the-sandbox"
	box := create(t, provide(t, cfg), spec)
	for to, want := range map[net.Addr]int{proxy.Addr(): 0, other.Addr(): 1} {
		host, port, _ := net.SplitHostPort(to.String())
		if _, code := sh(t, box, fmt.Sprintf("timeout 3 bash -c 'exec 3<>/dev/tcp/%s/%s' 2>/dev/null || exit 1", host, port)); code != want {
			t.Errorf("connect to %s: code %d, want %d", to, code, want)
		}
	}
	if out, _ := sh(t, box, "env"); strings.Contains(out, spec.EgressToken) || strings.Contains(out, "SPOOL_RUNNER") {
		t.Errorf("a command sees what is the runner's:\n%s", out)
	}
}

// otherAddress returns an address of this machine other than the given one.
func otherAddress(t *testing.T, not string) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() && n.IP.String() != not {
			return n.IP.String()
		}
	}
	t.Fatal("this machine has no other address")
	return ""
}

func authority(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	a, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	if err == nil {
		err = a.WriteTrustFile(filepath.Join(dir, "ca.pem"))
	}
	text, rerr := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err := errors.Join(err, rerr); err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestStock_BringsSkillsOnce(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	cfg := s.config(t)
	fetched := 0
	fetch := func(context.Context) (*os.File, error) {
		fetched++
		f, err := os.CreateTemp(t.TempDir(), "skill")
		if err != nil {
			return nil, err
		}
		w := zip.NewWriter(f)
		for name, text := range map[string]string{"SKILL.md": "---\nname: greet\ndescription: says hello\n---\nhello\n", "scripts/run.sh": "echo run\n"} {
			part, err := w.Create(name)
			if err != nil {
				return nil, err
			}
			if _, err := io.WriteString(part, text); err != nil {
				return nil, err
			}
		}
		return f, w.Close()
	}
	digest := strings.Repeat("ab", 32)
	spec := newSpec(t, cfg)
	p := provide(t, cfg)
	box := create(t, p, spec)
	if err := p.LoadSkills(t.Context(), spec.ID, []string{digest}); err == nil {
		t.Error("a skill that nobody shelved was brought")
	}
	for _, q := range []*Provider{p, p, provide(t, cfg)} {
		dir, err := q.StoreSkill(t.Context(), digest, fetch)
		if err != nil || dir != "/bin/skills/"+digest {
			t.Fatalf("shelved at %q, %v", dir, err)
		}
		if err := q.LoadSkills(t.Context(), spec.ID, []string{digest}); err != nil {
			t.Fatal(err)
		}
		if out, code := sh(t, box, "cat "+dir+"/SKILL.md "+dir+"/scripts/run.sh | tail -n 2"); out != "hello\necho run\n" || code != 0 {
			t.Errorf("inside: %q, code %d", out, code)
		}
		if out, _ := sh(t, box, "touch "+dir+"/x "+dir+"/SKILL.md 2>&1; rm -rf "+dir+" 2>&1; ls "+dir); !strings.Contains(out, "Permission denied") || !strings.Contains(out, "SKILL.md") {
			t.Errorf("the agent can change a skill: %s", out)
		}
	}
	if fetched != 3 { // checked twice, fetched once
		t.Errorf("the archive was fetched %d times, want 3", fetched)
	}
	if err := p.LoadSkills(t.Context(), newID(t, events.KindSandbox), []string{digest}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a sandbox that is not there: %v", err)
	}
}
