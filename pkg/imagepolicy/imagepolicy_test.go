package imagepolicy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/imagepolicy"
)

func TestCheck_ComparesNameTagAndDigest(t *testing.T) {
	t.Parallel()
	digest, other := "sha256:"+strings.Repeat("0a", 32), "sha256:"+strings.Repeat("0b", 32)
	for _, c := range []struct {
		name, patterns   string
		allowed, refused []string
	}{
		{"nothing", "", nil, []string{"a", "", "docker.io/library/a"}},
		{"a tag", "spool/sandbox:latest", []string{"spool/sandbox", "spool/sandbox:latest", "docker.io/spool/sandbox:latest"}, []string{
			"spool/sandbox:1", "spool/sandbox:latest@" + digest, "evil.example/spool/sandbox:latest", "spool/sandbox2", "spool/sandbox/x", "127.0.0.1:5000/spool/sandbox",
		}},
		{"a digest", "a@" + digest, []string{"a@" + digest, "a:1@" + digest}, []string{"a", "a@" + other, "b@" + digest, digest, digest[7:]}},
		{"a name", "registry.example.com:5000/a", []string{"registry.example.com:5000/a", "registry.example.com:5000/a:1", "registry.example.com:5000/a@" + digest}, []string{
			"registry.example.com/a", "registry.example.com:5001/a", "registry.example.com:5000/a/b", "a",
		}},
		{"a folder", "registry.example.com/team/*", []string{"registry.example.com/team/a", "registry.example.com/team/a/b:1"}, []string{
			"registry.example.com/teams/a", "registry.example.com/team", "team/a", "registry.example.com/team/../x", "registry.example.com.evil/team/a",
		}},
		{"a registry", "registry.example.com/*", []string{"registry.example.com/a", "registry.example.com/a/b:1"}, []string{"a", "docker.io/registry.example.com/a", "registry.example.com.evil/a", "registry.example.com:80/a"}},
		{"a registry with a port", "10.0.0.7:5000/*", []string{"10.0.0.7:5000/a", "10.0.0.7:5000/a/b:1"}, []string{"10.0.0.7/a", "10.0.0.7:50001/a", "10.0.0.8:5000/a"}},
		{"a user of docker.io", "acme/*", []string{"acme/a", "docker.io/acme/a:1", "index.docker.io/acme/a"}, []string{"acme", "library/acme", "evil.example/acme/a"}},
		{"official images", "library/*", []string{"debian", "debian:12"}, []string{"deadbeef", "sha256:" + digest[7:], "acme/a"}},
		{"several", "a:1, ,b:2", []string{"a:1", "b:2"}, []string{"a:2", "b"}},
		{"all", "*", []string{"a", "127.0.0.1:5000/x", digest}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p, err := imagepolicy.Parse("sandbox-images", strings.Split(c.patterns, ","))
			if err != nil {
				t.Fatal(err)
			}
			for _, image := range c.allowed {
				if err := p.Check(image); err != nil {
					t.Errorf("%s: %v", image, err)
				}
			}
			for _, image := range c.refused {
				if err := p.Check(image); !errors.Is(err, imagepolicy.ErrNotAllowed) {
					t.Errorf("%s: %v", image, err)
				}
			}
		})
	}
}

func TestParse_RefusesInvalidPatterns(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"A B", "http://x/y", "a:1/b:2/*", "a@sha256:0", "*/a", "a/**", "/a", "a*"} {
		if _, err := imagepolicy.Parse("sandbox-images", []string{pattern}); err == nil || !strings.HasPrefix(err.Error(), "sandbox-images: ") {
			t.Errorf("%s: %v", pattern, err)
		}
	}
}
