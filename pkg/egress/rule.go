package egress

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// EntrySyntax is a sentence about the syntax of an allowlist entry, for error messages.
const EntrySyntax = "an entry is host, host:port or *.host, optionally after methods and a space: GET,HEAD api.example.com"

// Limits of an entry's methods.
const (
	maxMethods      = 16
	maxMethodLength = 32 // characters
)

// Rule is the parsed form of an allowlist entry.
type Rule struct {
	Methods []string // sorted; empty means all
	Below   bool     // the rule is for all names below Host, but not for Host
	Host    Host
	Port    uint16 // 0 means 443 and 80

	Provider string // a feature that model providers may use; all other fields are empty then
}

// ParseRule parses an allowlist entry: host, host:port, *.host or *.host:port, where host may be a public address.
// Methods may precede the host: in upper case, separated by commas, with one space after the last. An entry
// provider:FEATURE allows agents a feature of model providers.
func ParseRule(entry string) (Rule, error) {
	var r Rule
	if entry == "" {
		return r, errors.New("is empty")
	}
	if feature, ok, err := parseProviderEntry(entry); ok {
		return Rule{Provider: feature}, err
	}
	if methods, rest, ok := strings.Cut(entry, " "); ok {
		list, err := parseMethods(methods)
		if err != nil {
			return Rule{}, err
		}
		r.Methods, entry = list, rest
	}
	return r, r.parseTarget(entry)
}

func parseMethods(s string) ([]string, error) {
	list := strings.Split(s, ",")
	if len(list) > maxMethods {
		return nil, fmt.Errorf("has %d methods; the limit is %d", len(list), maxMethods)
	}
	for i, m := range list {
		switch {
		case m == "":
			return nil, errors.New("has an empty method; methods must be in upper case, separated by commas, with one space after the last")
		case len(m) > maxMethodLength:
			return nil, fmt.Errorf("method %s is longer than %d characters", QuotePrefix(m), maxMethodLength)
		case strings.Trim(m, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" || m[0] == '-':
			return nil, fmt.Errorf("the text before the space must be methods: %s is not in upper case letters", QuotePrefix(m))
		case m == "CONNECT" || m == "TRACE":
			return nil, fmt.Errorf("method %s is never allowed", m)
		case slices.Contains(list[:i], m):
			return nil, fmt.Errorf("method %s is set twice", m)
		}
	}
	slices.Sort(list)
	return list, nil
}

// parseTarget parses the host and port of an entry, which follow the methods.
func (r *Rule) parseTarget(s string) error {
	if strings.Contains(s, "/") {
		return errors.New("must be a host, not a URL or a network")
	}
	below, wild := strings.CutPrefix(s, "*.")
	if !wild && strings.Contains(s, "*") {
		return errors.New("a star is allowed only at the beginning, before a dot")
	}
	host := below
	if i := strings.LastIndexByte(below, ':'); i >= 0 && i > strings.LastIndexByte(below, ']') {
		port, err := parsePort(below[i+1:])
		if err != nil {
			return err
		}
		host, r.Port = below[:i], port
	}
	h, err := ParseHost(host)
	switch {
	case err != nil:
		return err
	case h.Name == "" && wild:
		return errors.New("an address has no names below it")
	case h.Name == "":
		if err := CheckAddress(h.Addr); err != nil {
			return fmt.Errorf("is never reachable: %w", err)
		}
	case wild && !strings.Contains(h.Name, "."):
		return errors.New("must not be every host of a top-level domain")
	}
	r.Host, r.Below = h, wild
	return nil
}

// String returns the allowlist entry in canonical form: with sorted methods and a canonical host.
func (r Rule) String() string {
	if r.Provider != "" {
		return ProviderEntry(r.Provider)
	}
	s := r.Host.String()
	switch {
	case r.Port != 0:
		s = net.JoinHostPort(s, strconv.Itoa(int(r.Port)))
	case r.Host.Name == "" && r.Host.Addr.Is6():
		s = "[" + s + "]"
	}
	if r.Below {
		s = "*." + s
	}
	if len(r.Methods) > 0 {
		s = strings.Join(r.Methods, ",") + " " + s
	}
	return s
}

// allowedPorts returns the ports that the rule allows.
func (r Rule) allowedPorts() []uint16 {
	if r.Port != 0 {
		return []uint16{r.Port}
	}
	return defaultPorts[:]
}

// SourceEntries is a list of allowlist entries that come from one source, such as an agent or an environment.
type SourceEntries struct {
	From    string
	Entries []string
}

// SourcedEntry is an allowlist entry in canonical form, with the name of the first source that has it.
type SourcedEntry struct {
	Entry string
	From  string
}

// SourceError is returned for allowlist entries of a source that do not parse or exceed the limit.
type SourceError struct {
	From string // the source of the invalid layer
	Err  error
}

func (e *SourceError) Error() string { return fmt.Sprintf("egress of %s: %v", e.From, e.Err) }

func (e *SourceError) Unwrap() error { return e.Err }

// MergeEntries returns the allowlist entries of all sources, in their order, without duplicates. The error is a
// *SourceError, for more than limit entries or for an entry that does not parse.
func MergeEntries(limit int, layers ...SourceEntries) ([]SourcedEntry, error) {
	var out []SourcedEntry
	seen := map[string]bool{}
	for _, l := range layers {
		for i, entry := range l.Entries {
			r, err := ParseRule(entry)
			if err != nil {
				return nil, &SourceError{l.From, entryError(i, entry, err)}
			}
			if s := r.String(); !seen[s] {
				seen[s] = true
				out = append(out, SourcedEntry{Entry: s, From: l.From})
			}
			if len(out) > limit {
				return nil, &SourceError{l.From, fmt.Errorf("has more than %d entries together with the layers before", limit)}
			}
		}
	}
	return out, nil
}
