package command

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/go-connections/nat"
)

// hardened returns a container with the settings of the compose.yaml of this release.
func hardened(name string, env ...string) container.InspectResponse {
	limit := int64(512)
	return container.InspectResponse{
		ContainerJSONBase: &container.ContainerJSONBase{HostConfig: &container.HostConfig{
			CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges:true"}, Resources: container.Resources{PidsLimit: &limit},
		}},
		Config: &container.Config{Labels: map[string]string{composeServiceLabel: name}, Env: env, Image: "spool/" + name},
	}
}

// project returns a compose installation without findings.
func project() []container.InspectResponse {
	gateway := hardened("gateway", "SPOOL_DATABASE_URL=postgres://spool_gateway:x@postgres:5432/spool", "SPOOL_ALLOWED_ORIGINS=https://app.example.com")
	gateway.HostConfig.PortBindings = nat.PortMap{"7700/tcp": {{HostIP: "127.0.0.1", HostPort: "7700"}}}
	nats := hardened("nats")
	nats.Config.Image = "nats@sha256:" + strings.Repeat("0", 64)
	executor := hardened("executor", "SPOOL_LOG_KEYS=executor:k", "SPOOL_SANDBOX_RUNTIME=runsc", "SPOOL_SANDBOX_IMAGES=registry.example.com/*", "SPOOL_SANDBOX_IMAGES_PULL=true")
	executor.Mounts = []container.MountPoint{{Source: "/run/user/1000/docker.sock", Destination: engineSocketPath}}
	return []container.InspectResponse{
		gateway, nats, executor, hardened("session", "SPOOL_LOG_KEYS=session:k"), hardened("projector", "SPOOL_LOG_KEYS=session:k"),
		hardened("egress", "SPOOL_EGRESS_ALL_PATHS=false", "SPOOL_EGRESS_OPEN="),
	}
}

// highEnough returns a folder of kernel settings, all of which are high enough.
func highEnough(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, s := range KernelSettings() {
		path := filepath.Join(dir, strings.ReplaceAll(s.Name, ".", "/"))
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(strconv.FormatInt(s.Least, 10)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// securityOf returns the security checks of an installation whose server responds to every request with a status.
func securityOf(t *testing.T, status int) *securityChecks {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	t.Cleanup(s.Close)
	dir := t.TempDir()
	c := &doctorCommand{EnvFile: filepath.Join(dir, ".env"), Project: "spool", sysctls: highEnough(t), environ: func(string) string { return "" }}
	c.URL = s.URL
	return &securityChecks{
		doctorChecks: &doctorChecks{doctorCommand: c, app: &app{}, dir: dir}, containers: project(),
		engine: &system.Info{SecurityOptions: []string{"name=apparmor", "name=seccomp,profile=default", "name=userns"}},
	}
}

// container returns the container of a service.
func (x *securityChecks) container(name string) *container.InspectResponse {
	for i := range x.containers {
		if composeServiceOf(x.containers[i]) == name {
			return &x.containers[i]
		}
	}
	panic(name)
}

func TestDoctorSecurity_FindsEachMisconfiguration(t *testing.T) {
	t.Parallel()
	env := func(service, variable string) func(*testing.T, *securityChecks) {
		return func(_ *testing.T, x *securityChecks) {
			name, _, _ := strings.Cut(variable, "=")
			c := x.container(service)
			var kept []string
			for _, e := range c.Config.Env {
				if !strings.HasPrefix(e, name+"=") {
					kept = append(kept, e)
				}
			}
			c.Config.Env = append(kept, variable)
		}
	}
	host := func(service string, change func(*container.HostConfig)) func(*testing.T, *securityChecks) {
		return func(_ *testing.T, x *securityChecks) { change(x.container(service).HostConfig) }
	}
	publish := func(port nat.Port, ip string) func(*container.HostConfig) {
		return func(h *container.HostConfig) { h.PortBindings = nat.PortMap{port: {{HostIP: ip, HostPort: "9"}}} }
	}
	file := func(name string, mode os.FileMode) func(*testing.T, *securityChecks) {
		return func(t *testing.T, x *securityChecks) {
			if err := os.WriteFile(filepath.Join(x.dir, name), nil, mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, c := range map[string]struct {
		change              func(*testing.T, *securityChecks)
		check, status, says string
		answers             int
	}{
		"clear text from afar":       {change: func(_ *testing.T, x *securityChecks) { x.URL = "http://spool.example.com" }, check: "transport", status: "failed", says: "neither TLS nor loopback"},
		"TLS from afar":              {change: func(_ *testing.T, x *securityChecks) { x.URL = "https://user:pass@spool.example.com" }, check: "transport", status: "ok", says: "https://user:xxxxx@"},
		"no key":                     {answers: 200, check: "keys required", status: "note", says: "every program on this machine"},
		"a server that fails":        {answers: 503, check: "keys required", status: "note", says: "503"},
		"open metrics":               {answers: 200, check: "metrics closed", status: "note", says: "/metrics"},
		"passwords for all":          {change: file(".env", 0o644), check: "secret files", status: "failed", says: ".env (0644)"},
		"passwords for one":          {change: file(".env", 0o600), check: "secret files", status: "ok", says: "readable only by the owner"},
		"keys of the log for all":    {change: file("log.keys", 0o640), check: "secret files", status: "failed", says: "log.keys (0640)"},
		"a gateway that may write":   {change: env("gateway", "SPOOL_DATABASE_URL=postgres://spool:x@postgres/spool"), check: "database roles", status: "note", says: "connect as spool"},
		"NATS from afar":             {change: host("nats", publish("4222/tcp", "")), check: "published ports", status: "failed", says: "nats 4222/tcp"},
		"NATS on loopback":           {change: host("nats", publish("4222/tcp", "127.0.0.1")), check: "published ports", status: "ok"},
		"the egress proxy from afar": {change: host("egress", publish("7443/tcp", "0.0.0.0")), check: "published ports", status: "failed", says: "egress 7443/tcp"},
		"the egress proxy's TLS listener": {change: func(t *testing.T, x *securityChecks) {
			env("egress", "SPOOL_EGRESS_LISTEN_TLS=0.0.0.0:7443")(t, x)
			host("egress", publish("7443/tcp", "0.0.0.0"))(t, x)
		}, check: "published ports", status: "ok"},
		"another port of an egress proxy with TLS": {change: func(t *testing.T, x *securityChecks) {
			env("egress", "SPOOL_EGRESS_LISTEN_TLS=0.0.0.0:7443")(t, x)
			host("egress", publish("9090/tcp", "0.0.0.0"))(t, x)
		}, check: "published ports", status: "failed", says: "egress 9090/tcp"},
		"a gateway without TLS": {change: host("gateway", publish("7700/tcp", "0.0.0.0")), check: "published ports", status: "failed", says: "without TLS"},
		"privileged":            {change: host("session", func(h *container.HostConfig) { h.Privileged = true }), check: "services confined", status: "failed", says: "session: privileged"},
		"capabilities":          {change: host("session", func(h *container.HostConfig) { h.CapDrop = nil }), check: "services confined", status: "failed", says: "keeps capabilities"},
		"new privileges":        {change: host("session", func(h *container.HostConfig) { h.SecurityOpt = nil }), check: "services confined", status: "failed", says: "may gain privileges"},
		"no processes' limit":   {change: host("session", func(h *container.HostConfig) { h.PidsLimit = nil }), check: "services confined", status: "failed", says: "no limit of processes"},
		"the machine's network": {change: host("session", func(h *container.HostConfig) { h.NetworkMode = "host" }), check: "services confined", status: "failed", says: "in the network of the machine"},
		"no seccomp":            {change: host("session", func(h *container.HostConfig) { h.SecurityOpt = append(h.SecurityOpt, "seccomp=unconfined") }), check: "services confined", status: "failed", says: "without a seccomp profile"},
		"a socket of another": {change: func(_ *testing.T, x *securityChecks) {
			x.container("gateway").Mounts = x.container("executor").Mounts
		}, check: "engine's socket", status: "failed", says: "gateway"},
		"no socket":                 {change: func(_ *testing.T, x *securityChecks) { x.container("executor").Mounts = nil }, check: "engine's socket", status: "ok", says: "no container has it"},
		"an engine without seccomp": {change: func(_ *testing.T, x *securityChecks) { x.engine.SecurityOptions = nil }, check: "engine", status: "failed", says: "no seccomp"},
		"an engine without more":    {change: func(_ *testing.T, x *securityChecks) { x.engine.SecurityOptions = []string{"name=seccomp"} }, check: "engine", status: "note", says: "AppArmor"},
		"an engine without TLS": {change: func(_ *testing.T, x *securityChecks) {
			x.environ = func(name string) string { return map[string]string{"DOCKER_HOST": "tcp://10.0.0.9:2375"}[name] }
		}, check: "engine", status: "failed", says: "without TLS"},
		"the machine's kernel": {change: env("executor", "SPOOL_SANDBOX_RUNTIME="), check: "sandbox runtime", status: "note", says: "runsc"},
		"sandboxes at Modal": {change: func(t *testing.T, x *securityChecks) {
			env("executor", "SPOOL_SANDBOX_RUNTIME=")(t, x)
			env("executor", "SPOOL_SANDBOX=modal")(t, x)
		}, check: "sandbox runtime", status: "ok", says: "at Modal"},
		"disk limits at Modal": {change: env("executor", "SPOOL_SANDBOX=modal"), check: "disk limits of sandboxes", status: "ok", says: "the runner enforces them"},
		"any image":            {change: env("executor", "SPOOL_SANDBOX_IMAGES=spool/agents,*"), check: "image allowlist", status: "failed", says: "pull any image"},
		"any image of the engine": {change: func(t *testing.T, x *securityChecks) {
			env("executor", "SPOOL_SANDBOX_IMAGES=*")(t, x)
			env("executor", "SPOOL_SANDBOX_IMAGES_PULL=false")(t, x)
		}, check: "image allowlist", status: "note", says: "every image"},
		"a tag":               {change: func(_ *testing.T, x *securityChecks) { x.container("nats").Config.Image = "nats:2" }, check: "images by digest", status: "note", says: "nats:2"},
		"all paths":           {change: env("egress", "SPOOL_EGRESS_ALL_PATHS=true"), check: "egress", status: "note", says: "pass unread"},
		"a private host":      {change: env("egress", "SPOOL_EGRESS_OPEN=mcp.internal:8080"), check: "egress", status: "note", says: "mcp.internal:8080"},
		"no keys of the log":  {change: env("projector", "SPOOL_LOG_KEYS="), check: "signed log", status: "failed", says: "projector has no SPOOL_LOG_KEYS"},
		"a gateway with keys": {change: env("gateway", "SPOOL_LOG_KEYS=session:k"), check: "signed log", status: "failed", says: "the gateway has keys"},
		"any page":            {change: env("gateway", "SPOOL_ALLOWED_ORIGINS=https://a.example,*"), check: "web origins", status: "note", says: "every web page"},
		"no project":          {change: func(_ *testing.T, x *securityChecks) { x.containers = nil }, check: "services confined", status: "ok", says: "no compose project spool"},
		"no engine": {change: func(_ *testing.T, x *securityChecks) {
			x.containers, x.engine, x.engineErr = nil, nil, os.ErrNotExist
		}, check: "engine", status: "note", says: "cannot be reached"},
		"no engine for a project": {change: func(_ *testing.T, x *securityChecks) {
			x.containers, x.engine, x.engineErr = nil, nil, os.ErrNotExist
		}, check: "signed log", status: "note", says: "cannot be reached"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := securityOf(t, max(c.answers, 401))
			if c.answers > 0 {
				x = securityOf(t, c.answers)
			}
			for _, one := range x.allChecks() { // without the change every check passes
				if f := one.run(t.Context()); c.answers == 0 && f.Status != "ok" {
					t.Errorf("%s of a hardened installation: %+v", one.name, f)
				}
			}
			if c.change != nil {
				c.change(t, x)
			}
			for _, one := range x.allChecks() {
				if one.name != c.check {
					continue
				}
				if f := one.run(t.Context()); f.Status != c.status || !strings.Contains(f.Detail+" "+f.Remedy, c.says) {
					t.Errorf("%+v", f)
				}
				return
			}
			t.Errorf("there is no check %s", c.check)
		})
	}
}

// TestDoctorSecurity_MatchesTheChecklist tests that the checklist for operators names each check, in the same order.
func TestDoctorSecurity_MatchesTheChecklist(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(raw), "\n## Hardening checklist\n")
	list, _, _ = strings.Cut(list, "\n## ")
	at := -1
	for _, c := range securityOf(t, 401).allChecks() {
		next := strings.Index(list, "\n| "+c.name+" |")
		if next <= at {
			t.Errorf("%s is not in the list, or not at its place", c.name)
		}
		at = next
	}
}
