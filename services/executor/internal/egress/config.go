// Package egress is the egress proxy, the program cmd/egress. Sandboxes have no network: all their requests go through the
// proxy, one process for each engine, which outlives executors. The proxy serves a Unix socket and, if it is configured, a TLS
// port. It sets the credentials of requests to models, forwards other requests if an allowlist allows them, meters model calls,
// and journals model calls and denials. Executors use its admin API with package api. docs/adr/0013-egress.md describes both
// protocols.
package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
	"github.com/spoolhq/spool/services/executor/internal/egress/proxy"
)

// Config has the settings of the egress proxy. A zero field means the default of its setting.
type Config struct {
	ListenSandboxes string `default:"/run/spool/sandboxes/egress.sock" env:"SPOOL_EGRESS_LISTEN_SANDBOXES" help:"Unix socket for sandboxes; its folder is shared with them."`
	ListenAdmin     string `default:"/run/spool/admin/egress.sock" env:"SPOOL_EGRESS_LISTEN_ADMIN" help:"Unix socket of the admin API for executors; in another folder, which no sandbox sees."`
	ListenTLS       string `default:"" env:"SPOOL_EGRESS_LISTEN_TLS" help:"Address (host:port) at which sandboxes that share no Unix socket with the proxy connect over TLS 1.3; empty means none. Clients are authenticated only by a sandbox's token."`
	TLSCert         string `name:"tls-cert" default:"" env:"SPOOL_EGRESS_TLS_CERTIFICATE" help:"PEM file of the certificate of listen-tls, with its intermediate certificates. It is read again when it changes."`
	TLSKey          string `name:"tls-key" default:"" env:"SPOOL_EGRESS_TLS_KEY" help:"PEM file of the private key of that certificate."`
	ListenMetrics   string `default:"" env:"SPOOL_EGRESS_LISTEN_METRICS" help:"Address (host:port) that serves /metrics and /healthz too; empty means none."`
	Data            string `default:"/var/lib/spool/egress" env:"SPOOL_EGRESS_DATA" help:"Folder of registrations, journals and the key of the certificate authority."`

	AnthropicKey     string `name:"anthropic-api-key" default:"" env:"ANTHROPIC_API_KEY" help:"Key of requests to Anthropic's models."`
	AnthropicBaseURL string `name:"anthropic-base-url" default:"" env:"SPOOL_ANTHROPIC_BASE_URL" help:"Base URL of Anthropic's API, without /v1; empty means Anthropic itself."`
	OpenAIKey        string `name:"openai-api-key" default:"" env:"OPENAI_API_KEY" help:"Key of requests to OpenAI's models."`
	OpenAIBaseURL    string `name:"openai-base-url" default:"" env:"SPOOL_OPENAI_BASE_URL" help:"Base URL of OpenAI's API, with /v1; empty means OpenAI itself."`
	NVIDIAKey        string `name:"nvidia-api-key" default:"" env:"NVIDIA_API_KEY" help:"Key of requests to NVIDIA's models."`
	NVIDIABaseURL    string `name:"nvidia-base-url" default:"" env:"SPOOL_NVIDIA_BASE_URL" help:"Base URL of NVIDIA's API, with /v1; empty means NVIDIA itself."`
	AllPaths         bool   `default:"false" env:"SPOOL_EGRESS_ALL_PATHS" help:"Let sandboxes reach every path of these APIs, not only those of model calls. All tenants then share the files and batches of the key's account."`

	Hosts  string   `default:"" env:"SPOOL_EGRESS_HOSTS" help:"File (YAML or JSON) of further hosts, each with a route and a credential."`
	Prices string   `default:"" env:"SPOOL_EGRESS_PRICES" help:"File (YAML or JSON) of prices; empty means the built-in prices."`
	Open   []string `default:"" env:"SPOOL_EGRESS_OPEN" help:"Hosts with ports (mcp.internal:8080) of MCP servers that agents may use although their addresses are not public."`
	Closed []string `default:"" env:"SPOOL_EGRESS_CLOSED" help:"Networks (10.0.0.0/8) that no sandbox reaches, in addition to those that are not public."`

	Connections           int           `default:"64" env:"SPOOL_EGRESS_CONNECTIONS" help:"Limit of open connections of each sandbox."`
	TLSConnections        int           `name:"tls-connections" default:"4096" env:"SPOOL_EGRESS_TLS_CONNECTIONS" help:"Limit of connections of all sandboxes at listen-tls."`
	TLSAddressConnections int           `name:"tls-address-connections" default:"128" env:"SPOOL_EGRESS_TLS_ADDRESS_CONNECTIONS" help:"Limit of connections of one address (IPv6: of one /64 network) to listen-tls that have not named a registered sandbox yet; one more closes the oldest of them."`
	TLSHandshake          time.Duration `name:"tls-handshake" default:"10s" env:"SPOOL_EGRESS_TLS_HANDSHAKE" help:"How long a connection to listen-tls may take until it has named a registered sandbox."`

	Idle       time.Duration `default:"10m" env:"SPOOL_EGRESS_IDLE" help:"How long a tunnel, or a connection between two requests, may have no traffic, and how long a write to a sandbox may take."`
	ModelIdle  time.Duration `default:"15m" env:"SPOOL_EGRESS_MODEL_IDLE" help:"Time without data from a model after which its request is cancelled."`
	JournalMax int64         `default:"67108864" env:"SPOOL_EGRESS_JOURNAL_MAX" help:"Limit of the bytes in each sandbox's journal that no executor has acknowledged; above it model calls are refused."`
	KeepFor    time.Duration `default:"24h" env:"SPOOL_EGRESS_KEEP_FOR" help:"How long the journal of a released sandbox is kept if no executor acknowledges it."`
	Drain      time.Duration `default:"2m" env:"SPOOL_EGRESS_DRAIN" help:"Time for which open requests may continue after the signal to end; a second signal ends the process at once."`
}

// The base URLs of the model providers' own APIs.
const (
	AnthropicURL = "https://api.anthropic.com"
	OpenAIURL    = "https://api.openai.com/v1"
	NVIDIAURL    = "https://integrate.api.nvidia.com/v1"
)

// withDefaults returns the config with its defaults set, or an error that names the invalid setting.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	if c.Connections < 1 || c.Connections > 10_000 {
		return c, fmt.Errorf("connections: %d is not between 1 and 10000", c.Connections)
	}
	for _, n := range []struct {
		name        string
		value, most int
	}{{"tls-connections", c.TLSConnections, 1_000_000}, {"tls-address-connections", c.TLSAddressConnections, 1024}} {
		if n.value < 1 || n.value > n.most {
			return c, fmt.Errorf("%s: %d is not between 1 and %d", n.name, n.value, n.most)
		}
	}
	if c.JournalMax < 64<<10 {
		return c, fmt.Errorf("journal-max: %d is less than 65536", c.JournalMax)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"idle", c.Idle}, {"model-idle", c.ModelIdle}, {"keep-for", c.KeepFor}, {"drain", c.Drain}, {"tls-handshake", c.TLSHandshake}} {
		if d.value < 10*time.Millisecond || d.value > 30*24*time.Hour {
			return c, fmt.Errorf("%s: %s is not between 10ms and 720h", d.name, d.value)
		}
	}
	if err := c.checkTLS(); err != nil {
		return c, err
	}
	return c, c.checkSockets()
}

// checkTLS returns an error if only some of the settings of the TLS listener are set.
func (c Config) checkTLS() error {
	named, err := certificate.CheckPair(c.TLSCert, c.TLSKey)
	switch {
	case err != nil:
		return err
	case c.ListenTLS == "" && named:
		return errors.New("listen-tls: it is empty, and tls-cert names a certificate: set the address to serve it at")
	case c.ListenTLS == "":
		return nil
	case !named:
		return errors.New("listen-tls: it needs a certificate: set tls-cert and tls-key")
	}
	if _, err := net.ResolveTCPAddr("tcp", c.ListenTLS); err != nil {
		return fmt.Errorf("listen-tls: %q is not an address like 0.0.0.0:7443: %w", c.ListenTLS, err)
	}
	return nil
}

// Check returns an error that names the setting if a setting is invalid, as far as Check can find that without reading files.
func (c Config) Check() error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	c.Hosts = ""
	_, err = c.loadRoutes(nil)
	return err
}

// checkSockets returns an error if the admin socket or the data folder is in the folder that sandboxes see.
func (c Config) checkSockets() error {
	shared, err := filepath.Abs(filepath.Dir(c.ListenSandboxes))
	if err != nil {
		return fmt.Errorf("listen-sandboxes: %w", err)
	}
	for _, p := range []struct{ name, path string }{{"listen-admin", filepath.Dir(c.ListenAdmin)}, {"data", c.Data}} {
		abs, err := filepath.Abs(p.path)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if rel, err := filepath.Rel(shared, abs); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
			return fmt.Errorf("%s: %s is in the folder of listen-sandboxes, which sandboxes see: choose another", p.name, p.path)
		}
	}
	return nil
}

// parseClosedNetworks parses the setting Closed, a list of networks that sandboxes may not reach. All addresses that are not
// public are closed anyway.
func (c Config) parseClosedNetworks() ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range c.Closed {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("closed: %q is not a network like 10.0.0.0/8", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// parseOpenServers parses the setting Open, a list of MCP servers that agents may reach although their addresses are not
// public.
func (c Config) parseOpenServers() ([]egress.Target, error) {
	var out []egress.Target
	for _, s := range c.Open {
		if s == "" {
			continue
		}
		t, err := egress.ParseTarget(s, 0)
		if err != nil {
			return nil, fmt.Errorf("open: %q is not a host and a port like mcp.internal:8080: %w", s, err)
		}
		out = append(out, t)
	}
	return out, nil
}

// loadPrices returns the table of model prices: that of the configured file, or the built-in one.
func (c Config) loadPrices() (meter.Prices, error) {
	if c.Prices == "" {
		return meter.DefaultPrices()
	}
	raw, err := os.ReadFile(c.Prices)
	if err != nil {
		return meter.Prices{}, fmt.Errorf("prices: %w", err)
	}
	p, err := meter.ParsePrices(c.Prices, raw)
	if err != nil {
		return meter.Prices{}, fmt.Errorf("prices: %w", err)
	}
	return p, nil
}

// loadRoutes returns the routes to the model providers, and the routes that the hosts file describes. getenv returns the
// variables with credentials.
func (c Config) loadRoutes(getenv func(string) string) ([]proxy.Route, error) {
	bearer := func(name, key, keyName, base, baseName, public string) (proxy.Route, error) {
		u, err := parseBaseURL(base, public)
		if err != nil {
			return proxy.Route{}, fmt.Errorf("%s: %w", baseName, err)
		}
		rt := proxy.Route{Name: name, Kind: proxy.KindOpenAI, Base: u, Header: "Authorization", Scheme: "Bearer", Secret: key, All: c.AllPaths}
		if key == "" && base == "" {
			rt.Unset = "the egress proxy has no key for " + u.Host + ": its operator sets " + keyName
		}
		return rt, checkSecret(keyName, key)
	}
	anthropic, err := bearer(runner.EgressRouteAnthropic, c.AnthropicKey, "ANTHROPIC_API_KEY", c.AnthropicBaseURL, "anthropic-base-url", AnthropicURL)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(strings.TrimSuffix(anthropic.Base.Path, "/"), "/v1") {
		return nil, errors.New("anthropic-base-url: it ends in /v1: leave that out, clients append it")
	}
	anthropic.Kind, anthropic.Header, anthropic.Scheme = proxy.KindAnthropic, "X-Api-Key", ""
	openAI, err := bearer(runner.EgressRouteOpenAI, c.OpenAIKey, "OPENAI_API_KEY", c.OpenAIBaseURL, "openai-base-url", OpenAIURL)
	if err != nil {
		return nil, err
	}
	nvidia, err := bearer(runner.EgressRouteNVIDIA, c.NVIDIAKey, "NVIDIA_API_KEY", c.NVIDIABaseURL, "nvidia-base-url", NVIDIAURL)
	if err != nil {
		return nil, err
	}
	out := []proxy.Route{anthropic, openAI, nvidia}
	if c.Hosts == "" {
		return out, nil
	}
	raw, err := os.ReadFile(c.Hosts)
	if err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	more, err := parseHosts(c.Hosts, raw, getenv)
	if err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	return append(out, more...), nil
}

// checkSecret returns an error that begins with name if the value of a secret contains a character other than printable ASCII,
// or a space.
func checkSecret(name, value string) error {
	if strings.TrimFunc(value, func(r rune) bool { return r > ' ' && r <= '~' }) != "" || strings.ContainsAny(value, " \t\r\n") {
		return fmt.Errorf("%s: it has a character that no key has, such as a space or a newline", name)
	}
	return nil
}

// parseBaseURL parses the base URL s of an endpoint; it uses unset if s is "".
func parseBaseURL(s, unset string) (*url.URL, error) {
	if s == "" {
		s = unset
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("it is not a URL") // the parser's error repeats the text, which may have a password
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("it does not begin with http:// or https://")
	case u.Hostname() == "":
		return nil, errors.New("it names no host")
	case u.User != nil:
		return nil, errors.New("it has a user: set credentials in their own settings")
	case u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("it has a query or a fragment: set the address that paths are appended to")
	}
	return u, nil
}
