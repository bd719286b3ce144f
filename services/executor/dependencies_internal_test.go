package executor

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// The settings determine the sources of packages, the hosts that an installation may reach, its time limit, its size
// limit, and how long it is kept.
func TestSettingDependencies(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Config)
		layers layer.Config
		hosts  []string
		routes []string
	}{
		"docker": {
			func(c *Config) { c.Sandbox = ProviderDocker },
			layer.Config{NPMRegistry: "https://registry.npmjs.org", PIPIndexURL: "https://pypi.org/simple", Within: 10 * time.Minute, MaxBytes: 2 << 30, Keep: 168 * time.Hour},
			[]string{"files.pythonhosted.org:443", "pypi.org:443", "registry.npmjs.org:443"}, []string{},
		},
		"local": {
			func(c *Config) { c.Sandbox = ProviderLocal },
			layer.Config{Within: 10 * time.Minute, MaxBytes: 2 << 30, Keep: 168 * time.Hour},
			[]string{"files.pythonhosted.org:443", "pypi.org:443", "registry.npmjs.org:443"}, []string{},
		},
		"others": {
			func(c *Config) {
				c.Sandbox, c.NPMRegistry, c.PIPIndexURL = ProviderDocker, "https://npm.example.com:8443/x/", "http://pip.example.com/simple"
				c.DependenciesHosts, c.DependenciesTimeout, c.DependenciesSize, c.DependenciesKeep = []string{"", "*.example.org", "npm.example.com:8443"}, time.Minute, 5, time.Hour
			},
			layer.Config{NPMRegistry: "https://npm.example.com:8443/x/", PIPIndexURL: "http://pip.example.com/simple", Within: time.Minute, MaxBytes: 5, Keep: time.Hour},
			[]string{"*.example.org", "npm.example.com:8443", "pip.example.com:80"}, []string{},
		},
		"routes": {
			func(c *Config) {
				c.Sandbox, c.NPMRegistry, c.PIPIndexURL = ProviderDocker, "http://127.0.0.1:7070/npm", "http://127.0.0.1:7070/pypi/simple"
			},
			layer.Config{NPMRegistry: "http://127.0.0.1:7070/npm", PIPIndexURL: "http://127.0.0.1:7070/pypi/simple", Within: 10 * time.Minute, MaxBytes: 2 << 30, Keep: 168 * time.Hour},
			nil, []string{"npm", "pypi"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var cfg Config
			c.change(&cfg)
			cfg, err := cfg.withDefaults()
			if err != nil {
				t.Fatal(err)
			}
			if got := cfg.layerConfig(); got != c.layers {
				t.Errorf("layers %+v", got)
			}
			if got := cfg.installRegistries(); !slices.Equal(got.Hosts, c.hosts) || !slices.Equal(got.Routes, c.routes) || got.Routes == nil {
				t.Errorf("registries %+v", got)
			}
		})
	}
	for says, change := range map[string]func(*Config){
		"npm-registry: it is not http":           func(c *Config) { c.NPMRegistry = "registry.npmjs.org" },
		"pip-index-url: it has a user":           func(c *Config) { c.PIPIndexURL = "https://u:p@pip.example.com" },
		`"https://x": must be a host`:            func(c *Config) { c.DependenciesHosts = []string{"https://x"} },
		`"10.0.0.1:80": is never reachable`:      func(c *Config) { c.NPMRegistry = "http://10.0.0.1" },
		"dependencies-timeout: -1ns is not":      func(c *Config) { c.DependenciesTimeout = -1 },
		"dependencies-size: -1 is negative":      func(c *Config) { c.DependenciesSize = -1 },
		"dependencies-keep: 1s is not between":   func(c *Config) { c.DependenciesKeep = time.Second },
		"dependencies-keep: 8761h0m0s is not be": func(c *Config) { c.DependenciesKeep = 8761 * time.Hour },
	} {
		var c Config
		change(&c)
		if _, err := c.withDefaults(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %s", err, says)
		}
	}
}
