// Package imagepolicy decides which container images an installation may run. An image name like 10.0.0.7:5000/x
// makes a Docker engine connect to that host, so names that tenants choose are checked against the operator's list
// before they are passed to the engine.
package imagepolicy

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/distribution/reference"
)

// ErrNotAllowed is returned for an image that the policy does not allow. Its text has no details and may be shown to
// tenants.
var ErrNotAllowed = errors.New("the image is not one that this installation allows (SPOOL_SANDBOX_IMAGES)")

// ImageSettings are the settings of the images that an installation may run. The services that check them embed it in
// their Config.
type ImageSettings struct {
	SandboxImage  string   `default:"spool/sandbox:latest" env:"SPOOL_SANDBOX_IMAGE" help:"Image of Docker sandboxes, unless the session sets another one. Every session may name it. Session services and executors need the same value."`
	SandboxImages []string `default:"" env:"SPOOL_SANDBOX_IMAGES" help:"Other images that tenants may name for Docker sandboxes and for MCP servers in containers: name:tag, name@sha256:…, name (every tag), registry/folder/* (every name below), * for all. Empty allows only sandbox-image. Session services and executors check it and need the same value."`
}

// Policy is a list of images that may be run. The zero value allows none. It is safe for concurrent use.
type Policy struct {
	all     bool
	entries []imagePattern
}

// imagePattern is a parsed pattern of the policy, which allows one image name, or all names below a prefix.
type imagePattern struct {
	prefix string // "docker.io/acme/", for all names below it; "" for one name
	name   string // "docker.io/acme/tools"
	tag    string // "" for every tag
	digest string // "" for every digest, if tag is "" too
}

// Parse parses a list of patterns:
//
//	name:tag                 this tag, with whatever content it has at the time of use
//	name@sha256:…            this content
//	name                     every tag and digest of the name
//	registry/folder/*        every name below the folder
//	*                        every image
//
// As in Docker, names without a registry belong to docker.io. Empty patterns are skipped. Errors begin with the name
// of the setting.
func Parse(setting string, patterns []string) (Policy, error) {
	var p Policy
	for _, pattern := range patterns {
		pattern = strings.TrimSpace(pattern)
		if pattern == "" {
			continue
		}
		if pattern == "*" {
			p.all = true
			continue
		}
		const some = "any" // placeholder for the names below a folder
		folder, below := strings.CutSuffix(pattern, "/*")
		if below {
			folder += "/" + some
		}
		named, err := reference.ParseNormalizedNamed(folder)
		if err != nil {
			return Policy{}, fmt.Errorf("%s: %.200q is not an image: write name:tag, name@sha256:…, name, registry/folder/* or *", setting, pattern)
		}
		e := imagePattern{name: named.Name()}
		if below {
			e.prefix = strings.TrimSuffix(named.Name(), some)
		}
		if tagged, ok := named.(reference.Tagged); ok {
			e.tag = tagged.Tag()
		}
		if digested, ok := named.(reference.Digested); ok {
			e.digest = digested.Digest().String()
		}
		p.entries = append(p.entries, e)
	}
	return p, nil
}

// imageIDPrefix matches text that a Docker engine may take for the beginning of an image ID.
var imageIDPrefix = regexp.MustCompile(`^[0-9a-f]{4,64}$`)

// Check returns nil if the policy allows the image, and ErrNotAllowed otherwise.
func (p Policy) Check(image string) error {
	if p.all {
		return nil
	}
	named, err := reference.ParseNormalizedNamed(image)
	// "sha256:…" and hexadecimal digits select an image of the engine by its ID, regardless of its origin.
	if err != nil || imageIDPrefix.MatchString(image) || strings.HasPrefix(image, "sha256:") {
		return ErrNotAllowed
	}
	tag, digest := "latest", ""
	if tagged, ok := named.(reference.Tagged); ok {
		tag = tagged.Tag()
	}
	if digested, ok := named.(reference.Digested); ok {
		digest = digested.Digest().String()
	}
	for _, e := range p.entries {
		if e.allows(named.Name(), tag, digest) {
			return nil
		}
	}
	return ErrNotAllowed
}

// allows reports whether the pattern allows a normalized image; an empty digest means that the image has none. A Docker
// engine ignores the tag of an image that also has a digest.
func (e imagePattern) allows(name, tag, digest string) bool {
	switch {
	case e.prefix != "":
		return strings.HasPrefix(name, e.prefix)
	case e.name != name:
		return false
	case e.digest != "":
		return e.digest == digest
	case e.tag != "":
		return e.tag == tag && digest == ""
	}
	return true
}
