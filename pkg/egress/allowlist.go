package egress

import (
	"errors"
	"fmt"
	"strings"
)

// maxEntries bounds an allowlist.
const maxEntries = 1000

// defaultPorts are those of an entry that names none.
var defaultPorts = [...]uint16{443, 80}

// Allowlist says which targets a sandbox may name. The zero value allows nothing.
type Allowlist struct {
	hosts     map[Host][]uint16   // ports of a host
	wildcards map[string][]uint16 // ports of all names below a name
}

// EntryError says which entry of an allowlist does not parse, and why.
type EntryError struct {
	Index  int    // from 0
	Entry  string // as it was given
	Reason string
}

func (e *EntryError) Error() string {
	return fmt.Sprintf("allow[%d]: %s: %s; an entry is host, host:port or *.host", e.Index, Printable(e.Entry), e.Reason)
}

// ParseAllowlist reads entries of the forms host, host:port, *.host and
// *.host:port, where a host may be a public address. *.host means every name
// below it, not itself. An entry without a port means 443 and 80. The error is an
// *EntryError, of the first entry that does not parse.
func ParseAllowlist(entries []string) (Allowlist, error) {
	a := Allowlist{hosts: map[Host][]uint16{}, wildcards: map[string][]uint16{}}
	if len(entries) > maxEntries {
		return Allowlist{}, &EntryError{Index: maxEntries, Entry: entries[maxEntries], Reason: fmt.Sprintf("there are more than %d entries", maxEntries)}
	}
	for i, entry := range entries {
		if err := a.add(entry); err != nil {
			reason := err.Error()
			if bad := (*HostError)(nil); errors.As(err, &bad) {
				reason = bad.Reason
			}
			return Allowlist{}, &EntryError{Index: i, Entry: entry, Reason: reason}
		}
	}
	return a, nil
}

func (a *Allowlist) add(entry string) error {
	if entry == "" {
		return errors.New("it is empty")
	}
	if strings.Contains(entry, "/") {
		return errors.New("it is a URL or a network, not a host")
	}
	below, wild := strings.CutPrefix(entry, "*.")
	if !wild && strings.Contains(entry, "*") {
		return errors.New("a star stands only at the beginning, before a dot")
	}
	ports := defaultPorts[:]
	host := below
	if i := strings.LastIndexByte(below, ':'); i >= 0 && i > strings.LastIndexByte(below, ']') {
		port, err := parsePort(below[i+1:])
		if err != nil {
			return err
		}
		host, ports = below[:i], []uint16{port}
	}
	h, err := ParseHost(host)
	switch {
	case err != nil:
		return err
	case h.Name == "" && wild:
		return errors.New("there is nothing below an address")
	case h.Name == "":
		if err := CheckAddress(h.Addr); err != nil {
			return fmt.Errorf("nothing could reach it: %w", err)
		}
	case wild && !strings.Contains(h.Name, "."):
		return errors.New("that is every host of a top level domain")
	}
	if wild {
		a.wildcards[h.Name] = append(a.wildcards[h.Name], ports...)
	} else {
		a.hosts[h] = append(a.hosts[h], ports...)
	}
	return nil
}

// Allows tells whether an entry names the target.
func (a Allowlist) Allows(t Target) bool {
	if has(a.hosts[t.Host], t.Port) {
		return true
	}
	for rest := t.Host.Name; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			return false
		}
		if has(a.wildcards[parent], t.Port) {
			return true
		}
		rest = parent
	}
}

func has(ports []uint16, port uint16) bool {
	for _, p := range ports {
		if p == port {
			return true
		}
	}
	return false
}
