package egress

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// maxEntries bounds an allowlist.
const maxEntries = 1000

// defaultPorts are those of an entry that names none.
var defaultPorts = [...]uint16{443, 80}

// Allowlist says which targets a sandbox may name, and by which methods. The zero value allows nothing.
type Allowlist struct {
	hosts     map[Host][]grant   // of a host
	below     map[string][]grant // of all names below a name
	selective bool               // some entry has methods
	provider  []string           // what model providers may do
}

// grant is what one entry allows of a host.
type grant struct {
	port    uint16
	methods []string // none means all
}

// EntryError says which entry of an allowlist does not parse, and why.
type EntryError struct {
	Index  int    // from 0
	Entry  string // as it was given
	Reason string
}

func (e *EntryError) Error() string {
	return fmt.Sprintf("allow[%d]: %s: %s; %s", e.Index, Printable(e.Entry), e.Reason, Form)
}

func entryError(i int, entry string, err error) *EntryError {
	reason := err.Error()
	if bad := (*HostError)(nil); errors.As(err, &bad) {
		reason = bad.Reason
	}
	return &EntryError{Index: i, Entry: entry, Reason: reason}
}

// ParseAllowlist reads entries as ParseRule does. *.host means every name below it,
// not itself. An entry without a port means 443 and 80, one without methods means all.
// The error is an *EntryError, of the first entry that does not parse.
func ParseAllowlist(entries []string) (Allowlist, error) {
	a := Allowlist{hosts: map[Host][]grant{}, below: map[string][]grant{}}
	if len(entries) > maxEntries {
		return Allowlist{}, &EntryError{Index: maxEntries, Entry: entries[maxEntries], Reason: fmt.Sprintf("there are more than %d entries", maxEntries)}
	}
	for i, entry := range entries {
		r, err := ParseRule(entry)
		if err != nil {
			return Allowlist{}, entryError(i, entry, err)
		}
		a.add(r)
	}
	return a, nil
}

func (a *Allowlist) add(r Rule) {
	if r.Provider != "" {
		a.provider = append(a.provider, r.Provider)
		return
	}
	a.selective = a.selective || len(r.Methods) > 0
	for _, port := range r.ports() {
		g := grant{port, r.Methods}
		if r.Below {
			a.below[r.Host.Name] = append(a.below[r.Host.Name], g)
		} else {
			a.hosts[r.Host] = append(a.hosts[r.Host], g)
		}
	}
}

// Selective tells whether some entry has methods.
func (a Allowlist) Selective() bool { return a.selective }

// AllowsProvider reports whether an entry allows model providers a feature.
func (a Allowlist) AllowsProvider(feature string) bool { return slices.Contains(a.provider, feature) }

// Allows tells whether an entry names the target, for whatever method.
func (a Allowlist) Allows(t Target) bool { return a.Access(t).Named() }

// Access is what all entries that name a target allow of it together.
func (a Allowlist) Access(t Target) Access {
	var out Access
	out.add(a.hosts[t.Host], t.Port)
	for rest := t.Host.Name; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			return out
		}
		out.add(a.below[parent], t.Port)
		rest = parent
	}
}

// Access is what an allowlist allows of one target. The zero value is nothing.
type Access struct {
	all     bool
	methods []string // sorted
}

func (a *Access) add(list []grant, port uint16) {
	for _, g := range list {
		switch {
		case g.port != port:
		case len(g.methods) == 0:
			a.all = true
		default:
			a.methods = slices.Concat(a.methods, g.methods)
			slices.Sort(a.methods)
			a.methods = slices.Compact(a.methods)
		}
	}
}

// Named tells whether anything is allowed.
func (a Access) Named() bool { return a.all || len(a.methods) > 0 }

// All tells whether every method is allowed, so that nobody has to look at requests.
func (a Access) All() bool { return a.all }

// Allows tells whether a method is; upper and lower case differ.
func (a Access) Allows(method string) bool { return a.all || slices.Contains(a.methods, method) }

// Methods are those that are allowed, sorted; nil where all are, or nothing is.
func (a Access) Methods() []string {
	if a.all {
		return nil
	}
	return a.methods
}
