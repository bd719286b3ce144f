package egress

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// maxAllowlistEntries is the largest number of entries of an allowlist.
const maxAllowlistEntries = 1000

// defaultPorts are the ports that an allowlist entry without a port allows.
var defaultPorts = [...]uint16{443, 80}

// Allowlist is the set of targets that a sandbox may connect to, each with the allowed methods. The zero value allows
// nothing.
type Allowlist struct {
	hosts     map[Host][]portRule   // rules for a host
	below     map[string][]portRule // rules for all names below a name
	selective bool                  // at least one entry has methods
	provider  []string              // features that model providers may use
}

// portRule is a port of a host that an allowlist entry allows, with the allowed methods.
type portRule struct {
	port    uint16
	methods []string // empty means all
}

// EntryError is returned for an allowlist entry that does not parse.
type EntryError struct {
	Index  int    // from 0
	Entry  string // as it was given
	Reason string
}

func (e *EntryError) Error() string {
	return fmt.Sprintf("allow[%d]: %s: %s; %s", e.Index, QuotePrefix(e.Entry), e.Reason, EntrySyntax)
}

func entryError(i int, entry string, err error) *EntryError {
	reason := err.Error()
	if bad := (*HostError)(nil); errors.As(err, &bad) {
		reason = bad.Reason
	}
	return &EntryError{Index: i, Entry: entry, Reason: reason}
}

// ParseAllowlist parses the entries of an allowlist with ParseRule. *.host allows every name below host, but not host
// itself. An entry without a port allows 443 and 80. An entry without methods allows all methods. The error is an
// *EntryError for the first entry that does not parse.
func ParseAllowlist(entries []string) (Allowlist, error) {
	a := Allowlist{hosts: map[Host][]portRule{}, below: map[string][]portRule{}}
	if len(entries) > maxAllowlistEntries {
		return Allowlist{}, &EntryError{Index: maxAllowlistEntries, Entry: entries[maxAllowlistEntries], Reason: fmt.Sprintf("there are more than %d entries", maxAllowlistEntries)}
	}
	for i, entry := range entries {
		r, err := ParseRule(entry)
		if err != nil {
			return Allowlist{}, entryError(i, entry, err)
		}
		a.addRule(r)
	}
	return a, nil
}

func (a *Allowlist) addRule(r Rule) {
	if r.Provider != "" {
		a.provider = append(a.provider, r.Provider)
		return
	}
	a.selective = a.selective || len(r.Methods) > 0
	for _, port := range r.allowedPorts() {
		g := portRule{port, r.Methods}
		if r.Below {
			a.below[r.Host.Name] = append(a.below[r.Host.Name], g)
		} else {
			a.hosts[r.Host] = append(a.hosts[r.Host], g)
		}
	}
}

// RestrictsMethods reports whether at least one entry restricts the HTTP methods of its hosts.
func (a Allowlist) RestrictsMethods() bool { return a.selective }

// AllowsProvider reports whether an entry allows agents to use the given feature of model providers.
func (a Allowlist) AllowsProvider(feature string) bool { return slices.Contains(a.provider, feature) }

// Allows reports whether the allowlist allows any method for the target.
func (a Allowlist) Allows(t Target) bool { return a.Access(t).AllowsAny() }

// Access returns the methods that all entries of the allowlist together allow for a target.
func (a Allowlist) Access(t Target) Access {
	var out Access
	out.addMethods(a.hosts[t.Host], t.Port)
	for rest := t.Host.Name; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			return out
		}
		out.addMethods(a.below[parent], t.Port)
		rest = parent
	}
}

// Access holds the HTTP methods that an allowlist allows for a target. The zero value allows nothing.
type Access struct {
	all     bool
	methods []string // sorted
}

func (a *Access) addMethods(list []portRule, port uint16) {
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

// AllowsAny reports whether at least one method is allowed.
func (a Access) AllowsAny() bool { return a.all || len(a.methods) > 0 }

// AllowsAll reports whether every method is allowed, so that requests need not be inspected.
func (a Access) AllowsAll() bool { return a.all }

// Allows reports whether an HTTP method is allowed. Methods are case-sensitive.
func (a Access) Allows(method string) bool { return a.all || slices.Contains(a.methods, method) }

// Methods returns the allowed methods, sorted. It returns nil if all methods are allowed, or none.
func (a Access) Methods() []string {
	if a.all {
		return nil
	}
	return a.methods
}
