// Package dependency parses the dependencies of agents: npm and Python packages, each with an exact version. It is
// pure. It accepts only names and versions, so that an entry can be passed to an installer as an argument: no
// options, addresses, paths, ranges or tags.
package dependency

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// Limits.
const (
	MaxPackages      = 100 // packages of one kind
	maxNPMNameLength = 214 // characters of a name
	maxPIPNameLength = 128 // characters of a name
	maxEntryLength   = 400 // characters of an entry
)

// Package is an npm or Python package in one exact version.
type Package struct {
	Name    string   // npm: with its scope; Python: normalized to lower case with single hyphens
	Extras  []string // Python only: normalized, sorted, without duplicates
	Version string
	text    string
}

// String returns the package in canonical form, as the installers npm and pip accept it.
func (p Package) String() string { return p.text }

// The forms of entries, also used as patterns of the JSON Schema.
const (
	PatternNPM = `^(@[a-zA-Z0-9][a-zA-Z0-9._-]*/)?[a-zA-Z0-9][a-zA-Z0-9._-]*@` + semverPattern + `$`
	PatternPIP = `^[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?` + pipExtrasPattern + `==` + pep440Pattern + `$`

	semverPattern    = `(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?`
	pipExtraPattern  = `[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?`
	pipExtrasPattern = `(\[` + pipExtraPattern + `(,` + pipExtraPattern + `)*\])?`
	pep440Pattern    = `([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?`
)

var (
	npmEntryRegexp = regexp.MustCompile(PatternNPM)
	pipEntryRegexp = regexp.MustCompile(PatternPIP)
	nameSeparators = regexp.MustCompile(`[-_.]+`)
)

// ParseNPM parses the name and version of an npm package: name@1.2.3 or @scope/name@1.2.3.
func ParseNPM(s string) (Package, error) {
	at := strings.LastIndexByte(s, '@')
	if len(s) > maxEntryLength || !npmEntryRegexp.MatchString(s) || at > maxNPMNameLength {
		return Package{}, errors.New("must be an npm package with an exact version: name@1.2.3 or @scope/name@1.2.3, without range, tag or address")
	}
	return Package{Name: s[:at], Version: s[at+1:], text: s}, nil
}

// ParsePIP parses the name and version of a Python package: name==1.2.3 or name[extra,other]==1.2.3.
func ParsePIP(s string) (Package, error) {
	name, version, _ := strings.Cut(s, "==")
	name, list, bracket := strings.Cut(name, "[")
	if len(s) > maxEntryLength || !pipEntryRegexp.MatchString(s) || len(name) > maxPIPNameLength {
		return Package{}, errors.New("must be a Python package with an exact version: name==1.2.3 or name[extra]==1.2.3, without range, wildcard, marker or address")
	}
	p := Package{Name: normalizePIPName(name), Version: version}
	p.text = p.Name
	if bracket {
		for _, e := range strings.Split(strings.TrimSuffix(list, "]"), ",") {
			p.Extras = append(p.Extras, normalizePIPName(e))
		}
		slices.Sort(p.Extras)
		p.Extras = slices.Compact(p.Extras)
		p.text += "[" + strings.Join(p.Extras, ",") + "]"
	}
	p.text += "==" + version
	return p, nil
}

// normalizePIPName returns the normalized form of a Python package's name: lower case, with single hyphens.
func normalizePIPName(name string) string {
	return strings.ToLower(nameSeparators.ReplaceAllString(name, "-"))
}

// PackageSet lists the npm and Python packages on which an agent depends, sorted.
type PackageSet struct{ NPM, PIP []string }

// EntryError is returned for an invalid entry of an agent's list of packages.
type EntryError struct {
	List   string // npm or pip
	Index  int    // index from 0; -1 for the list as a whole
	Detail string
}

func (e *EntryError) Error() string {
	if e.Index < 0 {
		return e.List + ": " + e.Detail
	}
	return fmt.Sprintf("%s[%d]: %s", e.List, e.Index, e.Detail)
}

// Errors holds an error for each invalid entry of an agent's lists of packages.
type Errors []*EntryError

func (e Errors) Error() string {
	var list []string
	for _, w := range e {
		list = append(list, w.Error())
	}
	return strings.Join(list, "; ")
}

// Parse parses an agent's lists of npm and Python packages. The error is Errors with all problems.
func Parse(d events.Dependencies) (PackageSet, error) {
	npm, wrong := parseEntries("npm", d.NPM, ParseNPM)
	pip, more := parseEntries("pip", d.PIP, ParsePIP)
	if wrong = append(wrong, more...); len(wrong) > 0 {
		return PackageSet{}, wrong
	}
	return PackageSet{NPM: npm, PIP: pip}, nil
}

func parseEntries(list string, entries []string, read func(string) (Package, error)) (out []string, wrong Errors) {
	if len(entries) > MaxPackages {
		return nil, Errors{{list, -1, fmt.Sprintf("has %d entries; the limit is %d", len(entries), MaxPackages)}}
	}
	seen := map[string]int{}
	for i, s := range entries {
		p, err := read(s)
		if err != nil {
			wrong = append(wrong, &EntryError{list, i, fmt.Sprintf("%.80q: %v", s, err)})
			continue
		}
		if before, ok := seen[p.Name]; ok {
			wrong = append(wrong, &EntryError{list, i, fmt.Sprintf("%.80q is already in %s[%d]", p.Name, list, before)})
			continue
		}
		seen[p.Name] = i
		out = append(out, p.String())
	}
	slices.Sort(out)
	return out, wrong
}

// IsEmpty reports whether the set has no packages.
func (s PackageSet) IsEmpty() bool { return len(s.NPM)+len(s.PIP) == 0 }

// String returns the number of packages of each kind, for messages.
func (s PackageSet) String() string {
	switch {
	case len(s.PIP) == 0:
		return fmt.Sprintf("%d of npm", len(s.NPM))
	case len(s.NPM) == 0:
		return fmt.Sprintf("%d of pip", len(s.PIP))
	}
	return fmt.Sprintf("%d of npm and %d of pip", len(s.NPM), len(s.PIP))
}

// layerFormat is the version of the file layout of layers.
const layerFormat = "1"

// LayerDigest returns the name of the layer with these packages: the SHA-256, in hex, of the layout version, the base
// on which the packages are installed (an image by its id, or a machine), the platform, and both lists. Each text is
// prefixed with its length.
func (s PackageSet) LayerDigest(base, platform string) string {
	sum := sha256.New()
	put := func(list ...string) {
		var n [8]byte
		for _, t := range append([]string{fmt.Sprint(len(list))}, list...) {
			binary.BigEndian.PutUint64(n[:], uint64(len(t)))
			_, _ = sum.Write(append(n[:], t...)) // a hash never fails
		}
	}
	put(layerFormat, base, platform)
	put(s.NPM...)
	put(s.PIP...)
	return hex.EncodeToString(sum.Sum(nil))
}
