// Package dependency reads what agents depend on: packages of npm and of Python,
// each with one exact version. It is pure. What it takes is a name and a version
// and nothing else, so that an installer can be given it as an argument: no option,
// no address, no path, no range, no tag.
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

// Bounds.
const (
	Max      = 100 // packages of one kind
	maxNPM   = 214 // characters of a name
	maxPIP   = 128 // likewise
	maxEntry = 400 // characters of an entry
)

// Package is one with an exact version.
type Package struct {
	Name    string   // of npm with its scope; of Python normalized: lower case, one hyphen where others stand
	Extras  []string // of Python; normalized, sorted, each once
	Version string
	text    string
}

// String is the entry in its one spelling, as the installer takes it.
func (p Package) String() string { return p.text }

// The forms of entries, as patterns of JSON Schema too.
const (
	PatternNPM = `^(@[a-zA-Z0-9][a-zA-Z0-9._-]*/)?[a-zA-Z0-9][a-zA-Z0-9._-]*@` + semver + `$`
	PatternPIP = `^[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?` + extras + `==` + pep440 + `$`

	semver = `(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?`
	extra  = `[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?`
	extras = `(\[` + extra + `(,` + extra + `)*\])?`
	pep440 = `([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?`
)

var (
	formNPM = regexp.MustCompile(PatternNPM)
	formPIP = regexp.MustCompile(PatternPIP)
	joints  = regexp.MustCompile(`[-_.]+`)
)

// ParseNPM reads name@1.2.3 or @scope/name@1.2.3.
func ParseNPM(s string) (Package, error) {
	at := strings.LastIndexByte(s, '@')
	if len(s) > maxEntry || !formNPM.MatchString(s) || at > maxNPM {
		return Package{}, errors.New("it is not a package of npm with an exact version: name@1.2.3 or @scope/name@1.2.3, no range, tag or address")
	}
	return Package{Name: s[:at], Version: s[at+1:], text: s}, nil
}

// ParsePIP reads name==1.2.3 or name[extra,other]==1.2.3.
func ParsePIP(s string) (Package, error) {
	name, version, _ := strings.Cut(s, "==")
	name, list, bracket := strings.Cut(name, "[")
	if len(s) > maxEntry || !formPIP.MatchString(s) || len(name) > maxPIP {
		return Package{}, errors.New("it is not a package for Python with an exact version: name==1.2.3 or name[extra]==1.2.3, no range, wildcard, marker or address")
	}
	p := Package{Name: normal(name), Version: version}
	p.text = p.Name
	if bracket {
		for _, e := range strings.Split(strings.TrimSuffix(list, "]"), ",") {
			p.Extras = append(p.Extras, normal(e))
		}
		slices.Sort(p.Extras)
		p.Extras = slices.Compact(p.Extras)
		p.text += "[" + strings.Join(p.Extras, ",") + "]"
	}
	p.text += "==" + version
	return p, nil
}

// normal is the one spelling of names that Python takes for the same.
func normal(name string) string { return strings.ToLower(joints.ReplaceAllString(name, "-")) }

// Set is all that an agent depends on, sorted.
type Set struct{ NPM, PIP []string }

// EntryError says which entry is wrong, and why.
type EntryError struct {
	List   string // npm or pip
	Index  int    // from 0; -1 for the list as a whole
	Detail string
}

func (e *EntryError) Error() string {
	if e.Index < 0 {
		return e.List + ": " + e.Detail
	}
	return fmt.Sprintf("%s[%d]: %s", e.List, e.Index, e.Detail)
}

// Errors are all entries that are wrong.
type Errors []*EntryError

func (e Errors) Error() string {
	var list []string
	for _, w := range e {
		list = append(list, w.Error())
	}
	return strings.Join(list, "; ")
}

// Parse reads both lists. What is wrong is told at once, as Errors.
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
		return nil, Errors{{list, -1, fmt.Sprintf("there are %d; at most %d are taken", len(entries), Max)}}
	}
	seen := map[string]int{}
	for i, s := range entries {
		p, err := read(s)
		if err != nil {
			wrong = append(wrong, &EntryError{list, i, fmt.Sprintf("%.80q: %v", s, err)})
			continue
		}
		if before, ok := seen[p.Name]; ok {
			wrong = append(wrong, &EntryError{list, i, fmt.Sprintf("%.80q stands in %s[%d] already", p.Name, list, before)})
			continue
		}
		seen[p.Name] = i
		out = append(out, p.String())
	}
	slices.Sort(out)
	return out, wrong
}

// Empty tells whether there is nothing to install.
func (s Set) Empty() bool { return len(s.NPM)+len(s.PIP) == 0 }

// String is a short word on how many there are.
func (s Set) String() string {
	switch {
	case len(s.PIP) == 0:
		return fmt.Sprintf("%d of npm", len(s.NPM))
	case len(s.NPM) == 0:
		return fmt.Sprintf("%d of pip", len(s.PIP))
	}
	return fmt.Sprintf("%d of npm and %d of pip", len(s.NPM), len(s.PIP))
}

// format is how a layer is laid out. Another layout is another number.
const format = "1"

// Digest names the layer of the set: the SHA-256, in hex, of the layout's number,
// what it is installed on (an image by its id, a machine), its platform, and both
// lists, each text after its length. The same set on the same ground is the same layer.
func (s Set) Digest(ground, platform string) string {
	sum := sha256.New()
	put := func(list ...string) {
		var n [8]byte
		for _, t := range append([]string{fmt.Sprint(len(list))}, list...) {
			binary.BigEndian.PutUint64(n[:], uint64(len(t)))
			_, _ = sum.Write(append(n[:], t...)) // a hash takes everything
		}
	}
	put(format, ground, platform)
	put(s.NPM...)
	put(s.PIP...)
	return hex.EncodeToString(sum.Sum(nil))
}
