package egress

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress/proxy"
)

// upstreamHost is an upstream host that the operator describes in the file of SPOOL_EGRESS_HOSTS.
type upstreamHost struct {
	Name   string  `yaml:"name"`   // of the route, the first element of its path
	URL    string  `yaml:"url"`    // that the rest of a path is appended to
	Header *string `yaml:"header"` // of the credential; absent means Authorization
	Scheme *string `yaml:"scheme"` // before the credential; absent means Bearer in Authorization, and nothing elsewhere
	Env    string  `yaml:"env"`    // name of the variable that holds the credential; absent means there is none
	Kind   string  `yaml:"kind"`   // anthropic or openai, the protocol of a host that is metered
}

var (
	routeNameFormat  = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
	headerNameFormat = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)
	schemeNameFormat = regexp.MustCompile(`^[A-Za-z0-9-]{0,32}$`)
)

// parseHosts parses the operator's file of upstream hosts, which has a list `hosts:`, and returns a route for
// each host. An error names the entry and its field. getenv returns the variables with credentials.
func parseHosts(file string, raw []byte, getenv func(string) string) ([]proxy.Route, error) {
	var doc struct {
		Hosts []upstreamHost `yaml:"hosts"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	dec.KnownFields(true)
	if err := dec.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	taken := map[string]bool{runner.EgressRouteAnthropic: true, runner.EgressRouteOpenAI: true, runner.EgressRouteNVIDIA: true}
	var out []proxy.Route
	for i, h := range doc.Hosts {
		rt, err := h.route(getenv)
		if err == nil && taken[h.Name] {
			err = errors.New("name: another route has this name already")
		}
		if err != nil {
			return nil, fmt.Errorf("%s: hosts[%d] (%s): %w", file, i, h.Name, err)
		}
		taken[h.Name] = true
		out = append(out, rt)
	}
	return out, nil
}

// route returns the proxy's route to the host, with the credential that getenv returns.
func (h upstreamHost) route(getenv func(string) string) (proxy.Route, error) {
	if !routeNameFormat.MatchString(h.Name) {
		return proxy.Route{}, errors.New("name: it is not 1 to 32 of a-z, 0-9 and -")
	}
	if h.Name == "mcp" {
		return proxy.Route{}, errors.New("name: mcp is the route of MCP servers")
	}
	if h.URL == "" {
		return proxy.Route{}, errors.New("url: it is absent")
	}
	u, err := parseBaseURL(h.URL, "")
	if err != nil {
		return proxy.Route{}, fmt.Errorf("url: %w", err)
	}
	rt := proxy.Route{Name: h.Name, Kind: proxy.RouteKind(h.Kind), Base: u, Header: "Authorization", All: true}
	switch rt.Kind {
	case proxy.KindAnthropic, proxy.KindOpenAI, proxy.KindPlain:
	default:
		return proxy.Route{}, fmt.Errorf("kind: %q is neither anthropic nor openai", h.Kind)
	}
	if h.Header != nil {
		rt.Header = http.CanonicalHeaderKey(*h.Header)
		if !headerNameFormat.MatchString(rt.Header) {
			return proxy.Route{}, fmt.Errorf("header: %q is not a header name", *h.Header)
		}
	}
	if rt.Header == "Authorization" {
		rt.Scheme = "Bearer"
	}
	if h.Scheme != nil {
		rt.Scheme = *h.Scheme
		if !schemeNameFormat.MatchString(rt.Scheme) {
			return proxy.Route{}, fmt.Errorf("scheme: %q is not an authentication scheme", *h.Scheme)
		}
	}
	if h.Env == "" {
		return rt, nil
	}
	if rt.Secret = getenv(h.Env); rt.Secret == "" {
		return proxy.Route{}, fmt.Errorf("env: the variable %s is empty: set it to the credential", h.Env)
	}
	return rt, checkSecret(h.Env, rt.Secret)
}
