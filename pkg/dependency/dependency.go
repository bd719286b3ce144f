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
	Max      = 100 // packages of one kind
	maxNPM   = 214 // characters of a name
	maxPIP   = 128 // characters of a name
	maxEntry = 400 // characters of an entry
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
	PatternNPM = `^(@[a-zA-Z0-9][a-zA-Z0-9._-]*/)?[a-zA-Z0-9][a-zA-Z0-9._-]*@` + semver + `$`
	PatternPIP = `^[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?` + extras + `==` + pep440 + `$`

	semver          = `(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?`
	pipExtraPattern = `[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?`
	extras          = `(\[` + pipExtraPattern + `(,` + pipExtraPattern + `)*\])?`
	pep440          = `([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?`
)

var (
	formNPM    = regexp.MustCompile(PatternNPM)
	formPIP    = regexp.MustCompile(PatternPIP)
	separators = regexp.MustCompile(`[-_.]+`)
)

// ParseNPM parses name@1.2.3 or @scope/name@1.2.3.
func ParseNPM(s string) (Package, error) {
	at := strings.LastIndexByte(s, '@')
	if len(s) > maxEntry || !formNPM.MatchString(s) || at > maxNPM {
		return Package{}, errors.New("must be an npm package with an exact version: name@1.2.3 or @scope/name@1.2.3, without range, tag or address")
	}
	return Package{Name: s[:at], Version: s[at+1:], text: s}, nil
}

// ParsePIP parses name==1.2.3 or name[extra,other]==1.2.3.
func ParsePIP(s string) (Package, error) {
	name, version, _ := strings.Cut(s, "==")
	name, list, bracket := strings.Cut(name, "[")
	if len(s) > maxEntry || !formPIP.MatchString(s) || len(name) > maxPIP {
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
	return strings.ToLower(separators.ReplaceAllString(name, "-"))
}

// Set lists the npm and Python packages on which an agent depends, sorted.
type Set struct{ NPM, PIP []string }

// EntryError is returned for an invalid entry of an agent's list of dependencies.
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

// Errors holds an error for each invalid entry of an agent's dependencies.
type Errors []*EntryError

func (e Errors) Error() string {
	var list []string
	for _, w := range e {
		list = append(list, w.Error())
	}
	return strings.Join(list, "; ")
}

// Parse parses both lists. The error is Errors with all problems.
func Parse(d events.Dependencies) (Set, error) {
	npm, wrong := parse("npm", d.NPM, ParseNPM)
	pip, more := parse("pip", d.PIP, ParsePIP)
	if wrong = append(wrong, more...); len(wrong) > 0 {
		return Set{}, wrong
	}
	return Set{NPM: npm, PIP: pip}, nil
}

func parse(list string, entries []string, read func(string) (Package, error)) (out []string, wrong Errors) {
	if len(entries) > Max {
		return nil, Errors{{list, -1, fmt.Sprintf("has %d entries; the limit is %d", len(entries), Max)}}
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

// Empty reports whether the set has no packages.
func (s Set) Empty() bool { return len(s.NPM)+len(s.PIP) == 0 }

// String returns the number of packages, for messages.
func (s Set) String() string {
	switch {
	case len(s.PIP) == 0:
		return fmt.Sprintf("%d of npm", len(s.NPM))
	case len(s.NPM) == 0:
		return fmt.Sprintf("%d of pip", len(s.PIP))
	}
	return fmt.Sprintf("%d of npm and %d of pip", len(s.NPM), len(s.PIP))
}

// format is the version of the layout of a layer.
const format = "1"

// Digest returns the name of the layer for the set: the SHA-256, in hex, of the layout version, the base on which
// it is installed (an image by its id, or a machine), the platform, and both lists, each text prefixed with its
// length.
func (s Set) Digest(base, platform string) string {
	sum := sha256.New()
	put := func(list ...string) {
		var n [8]byte
		for _, t := range append([]string{fmt.Sprint(len(list))}, list...) {
			binary.BigEndian.PutUint64(n[:], uint64(len(t)))
			_, _ = sum.Write(append(n[:], t...)) // a hash never fails
		}
	}
	put(format, base, platform)
	put(s.NPM...)
	put(s.PIP...)
	return hex.EncodeToString(sum.Sum(nil))
}
