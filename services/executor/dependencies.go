package executor

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/layer"
	"github.com/spoolhq/spool/services/executor/internal/provision"
)

// The sources of packages if the settings name no others.
const (
	npmRegistry  = "https://registry.npmjs.org"
	pipIndex     = "https://pypi.org/simple"
	pipFilesHost = "files.pythonhosted.org:443" // the index only names them
)

// The shortest and the longest time for which the setting may keep an unused layer.
const (
	minLayerKeep = time.Minute
	maxLayerKeep = 365 * 24 * time.Hour
)

// checkDependencies sets the defaults of the settings for dependency layers, and returns an error if one of these settings is invalid.
func (c *Config) checkDependencies() error {
	for name, s := range map[string]string{"npm-registry": c.NPMRegistry, "pip-index-url": c.PIPIndexURL} {
		if s == "" {
			continue
		}
		if err := layer.CheckURL(s); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	c.DependenciesHosts = slices.DeleteFunc(c.DependenciesHosts, func(h string) bool { return h == "" })
	var wrong *egress.EntryError
	if _, err := egress.ParseAllowlist(c.installRegistries().Hosts); errors.As(err, &wrong) {
		return fmt.Errorf("dependencies-hosts, npm-registry or pip-index-url: %q: %s", wrong.Entry, wrong.Reason)
	}
	if c.DependenciesSize < 0 {
		return fmt.Errorf("dependencies-size: %d is negative", c.DependenciesSize)
	}
	if c.DependenciesKeep < minLayerKeep || c.DependenciesKeep > maxLayerKeep {
		return fmt.Errorf("dependencies-keep: %s is not between %s and %s", c.DependenciesKeep, minLayerKeep, maxLayerKeep)
	}
	return nil
}

// layerConfig returns the configuration of dependency layers for the sandbox provider. For local sandboxes an empty registry setting
// means that npm and pip use the configuration of this machine.
func (c Config) layerConfig() layer.Config {
	l := layer.Config{NPMRegistry: c.NPMRegistry, PIPIndexURL: c.PIPIndexURL, Within: c.DependenciesTimeout, MaxBytes: c.DependenciesSize, Keep: c.DependenciesKeep}
	if c.Sandbox == ProviderDocker {
		l.NPMRegistry, l.PIPIndexURL = c.npmRegistryURL(), c.pipIndexURL()
	}
	return l
}

// npmRegistryURL returns the URL of the npm registry from which dependencies are installed.
func (c Config) npmRegistryURL() string {
	if c.NPMRegistry == "" {
		return npmRegistry
	}
	return c.NPMRegistry
}

// pipIndexURL returns the URL of the Python package index from which dependencies are installed.
func (c Config) pipIndexURL() string {
	if c.PIPIndexURL == "" {
		return pipIndex
	}
	return c.PIPIndexURL
}

// installRegistries returns the hosts and the routes of the egress proxy that a sandbox may reach while dependencies are installed in it.
func (c Config) installRegistries() provision.Registries {
	r := provision.Registries{Hosts: slices.Clone(c.DependenciesHosts), Routes: []string{}}
	if c.pipIndexURL() == pipIndex {
		r.Hosts = append(r.Hosts, pipFilesHost)
	}
	for _, s := range []string{c.npmRegistryURL(), c.pipIndexURL()} {
		u, err := url.Parse(s)
		if err != nil {
			continue // checked before
		}
		if u.Host == runner.EgressAddress {
			name, _, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
			r.Routes = append(r.Routes, name)
			continue
		}
		port := u.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
		}
		r.Hosts = append(r.Hosts, net.JoinHostPort(u.Hostname(), port))
	}
	slices.Sort(r.Hosts)
	slices.Sort(r.Routes)
	r.Hosts, r.Routes = slices.Compact(r.Hosts), slices.Compact(r.Routes)
	return r
}
