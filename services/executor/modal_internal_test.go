package executor

import (
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/executor/internal/modal"
)

// modalConfig returns a valid configuration for sandboxes on Modal.
func modalConfig(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	if err == nil {
		err = authority.WriteTrustFile(filepath.Join(dir, "ca.pem"))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "runner"), nil, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Sandbox: ProviderModal, Runner: filepath.Join(dir, "runner"), ModalTokenID: "ak-1", ModalTokenSecret: "as-1", ModalImage: "registry.example.com/sandbox:1",
		EgressServer: "192.0.2.7:7443", EgressAuthority: filepath.Join(dir, "ca.pem"), EgressAdmin: "/run/spool/admin/egress.sock",
	}
}

// The settings of Modal sandboxes reach the provider; an invalid one stops the executor with an error that names it.
func TestSettingModal(t *testing.T) {
	t.Parallel()
	made := func(change func(*Config)) (modal.Config, error) {
		t.Helper()
		c := modalConfig(t)
		if change != nil {
			change(&c)
		}
		c, err := c.withDefaults()
		if err != nil {
			return modal.Config{}, err
		}
		return c.modalConfig(nil)
	}
	plain, err := made(nil)
	if err != nil {
		t.Fatal(err)
	}
	if plain.App != "spool" || plain.Engine != "modal-spool" || plain.Timeout != 24*time.Hour || plain.Limits.MemoryBytes != 2<<30 || plain.Limits.CPUs != 2 || plain.Limits.DiskBytes != 10<<30 {
		t.Errorf("defaults: %+v", plain)
	}
	if plain.Egress.Server != "192.0.2.7:7443" || !strings.Contains(plain.Egress.Authority, "BEGIN CERTIFICATE") {
		t.Errorf("egress: %+v", plain.Egress)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("as-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*Config)
		want   func(*modal.Config)
	}{
		{func(c *Config) { c.ModalTokenID = "ak-2" }, func(m *modal.Config) { m.TokenID = "ak-2" }},
		{func(c *Config) { c.ModalTokenSecret = "as-2" }, func(m *modal.Config) { m.TokenSecret = "as-2" }},
		{func(c *Config) { c.ModalTokenSecret, c.ModalTokenSecretFile = "", secret }, func(m *modal.Config) { m.TokenSecret = "as-file" }},
		{func(c *Config) { c.ModalEnvironment = "staging" }, func(m *modal.Config) { m.Environment = "staging" }},
		{func(c *Config) { c.ModalApp = "agents" }, func(m *modal.Config) { m.App, m.Engine = "agents", "modal-agents" }},
		{func(c *Config) { c.ModalApp, c.Engine = "agents", "cloud" }, func(m *modal.Config) { m.App, m.Engine = "agents", "cloud" }},
		{func(c *Config) { c.ModalRegion = "us-east" }, func(m *modal.Config) { m.Region = "us-east" }},
		{func(c *Config) { c.ModalImage = "other:2" }, func(m *modal.Config) { m.Image = "other:2" }},
		{func(c *Config) { c.ModalServerURL = "http://127.0.0.1:99" }, func(m *modal.Config) { m.ServerURL = "http://127.0.0.1:99" }},
		{func(c *Config) { c.ModalTimeout = time.Hour }, func(m *modal.Config) { m.Timeout = time.Hour }},
		{func(c *Config) { c.SandboxMemory, c.SandboxCPUs, c.SandboxDisk = 1<<30, 0.5, 1<<20 }, func(m *modal.Config) { m.Limits.MemoryBytes, m.Limits.CPUs, m.Limits.DiskBytes = 1<<30, 0.5, 1<<20 }},
	} {
		want := plain
		c.want(&want)
		got, err := made(c.change)
		got.Runner, got.Egress = plain.Runner, plain.Egress // they are in another folder
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v\nwant %+v", got, err, want)
		}
	}
	for says, change := range map[string]func(*Config){
		"modal-token-id:":            func(c *Config) { c.ModalTokenID = "" },
		"modal-token-secret:":        func(c *Config) { c.ModalTokenSecret = "" },
		"modal-token-secret and":     func(c *Config) { c.ModalTokenSecretFile = secret },
		"modal-token-secret-file:":   func(c *Config) { c.ModalTokenSecret, c.ModalTokenSecretFile = "", "/nowhere" },
		"modal-environment:":         func(c *Config) { c.ModalEnvironment = "a b" },
		"modal-app:":                 func(c *Config) { c.ModalApp = "a/b" },
		"modal-region:":              func(c *Config) { c.ModalRegion = "US" },
		"modal-image:":               func(c *Config) { c.ModalImage = "" },
		"modal-server-url:":          func(c *Config) { c.ModalServerURL = "modal" },
		"modal-sandbox-price:":       func(c *Config) { c.ModalSandboxPrice = math.Inf(1) },
		"modal-timeout:":             func(c *Config) { c.ModalTimeout = time.Minute },
		"egress-server: it is empty": func(c *Config) { c.EgressServer = "" },
		"at port 443 alone":          func(c *Config) { c.EgressServer = "proxy.example.com:7443" },
	} {
		if _, err := made(change); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v\nwant %s", err, says)
		}
	}
}

// SPOOL_SANDBOX=modal selects sandboxes on Modal, and an unreachable Modal does not stop an executor.
func TestSettingSandbox_Modal(t *testing.T) {
	t.Parallel()
	c := modalConfig(t)
	c.ModalServerURL = "http://127.0.0.1:1"
	c, err := c.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	own, err := c.newProvider(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p, ok := own.(*modal.Provider)
	if !ok {
		t.Fatalf("the provider is %T", own)
	}
	e := &Executor{own: own, deps: Deps{Logger: slog.New(slog.DiscardHandler)}}
	if err := e.verifyModal(t.Context()); err != nil {
		t.Errorf("while Modal is away: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// Agents on Modal reach models through the egress proxy, without the executor's keys.
func TestModal_AgentsReachModelsThroughTheProxy(t *testing.T) {
	t.Parallel()
	c := modalConfig(t)
	c.AnthropicKey, c.AnthropicBaseURL = "sk-of-the-executor", "https://models.example.com"
	env := c.modelEnvironment("claude-code", "anthropic")
	if env["ANTHROPIC_API_KEY"] != placeholderKey || env["ANTHROPIC_BASE_URL"] != "http://127.0.0.1:7070/anthropic" || env["HTTPS_PROXY"] != "http://127.0.0.1:7070" {
		t.Errorf("variables %v", env)
	}
}
