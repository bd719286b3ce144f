// Package egress is the allowlist of hosts that a sandbox may reach: what an
// entry may look like, and what it matches. It is pure.
package egress

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Rule is an entry of an allowlist.
type Rule struct {
	Host      string // in lower case, without a final dot; an IP address as netip writes it
	Subdomain bool   // *.host: every name below the host, and not the host itself
	Port      uint16 // 0 for the ports that a rule without one allows: 80 and 443
}

const (
	maxHost  = 253 // of a name in DNS
	maxLabel = 63
)

// ParseRule reads an entry: host, host:port, *.host or *.host:port. An IPv6
// address stands in brackets. The error is one sentence without the entry's field.
func ParseRule(s string) (Rule, error) {
	fail := func(why string) (Rule, error) {
		return Rule{}, fmt.Errorf("%.80q is no entry of an allowlist: %s", s, why)
	}
	if s == "" {
		return Rule{}, fmt.Errorf("an entry of an allowlist is empty: write host, host:port or *.host")
	}
	if strings.Contains(s, "://") || strings.ContainsAny(s, "/?#@") {
		return fail("write the host alone, as api.example.com or api.example.com:8443, without scheme, user and path")
	}
	host, port, err := split(s)
	if err != nil {
		return fail(err.Error())
	}
	r := Rule{Port: port}
	if rest, ok := strings.CutPrefix(host, "*."); ok {
		host, r.Subdomain = rest, true
	}
	r.Host = strings.ToLower(strings.TrimSuffix(host, "."))
	if addr, err := netip.ParseAddr(r.Host); err == nil {
		if r.Subdomain || addr.Zone() != "" {
			return fail("an address takes neither * nor a zone")
		}
		r.Host = addr.Unmap().String()
		return r, nil
	}
	if why := checkName(r.Host); why != "" {
		return fail(why)
	}
	return r, nil
}

// split takes the port off.
func split(s string) (host string, port uint16, err error) {
	var text string
	var has bool
	if rest, ok := strings.CutPrefix(s, "["); ok {
		host, text, ok = strings.Cut(rest, "]")
		if addr, err := netip.ParseAddr(host); !ok || err != nil || !addr.Is6() {
			return "", 0, fmt.Errorf("in brackets stands an IPv6 address")
		}
		if text == "" {
			return host, 0, nil
		}
		if text, has = strings.CutPrefix(text, ":"); !has {
			return "", 0, fmt.Errorf("behind the bracket stands a colon and a port, or nothing")
		}
	} else if strings.Count(s, ":") > 1 {
		return "", 0, fmt.Errorf("an IPv6 address stands in brackets, as [2001:db8::1]:443")
	} else if host, text, has = strings.Cut(s, ":"); !has {
		return host, 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || text[0] == '+' {
		return "", 0, fmt.Errorf("a port is a number from 1 to 65535")
	}
	return host, uint16(n), nil
}

// checkName says what is wrong with a name of DNS; "" for nothing.
func checkName(host string) string {
	if host == "" || len(host) > maxHost {
		return fmt.Sprintf("a host has 1 to %d characters", maxHost)
	}
	labels := strings.Split(host, ".")
	for _, label := range labels {
		if label == "" || len(label) > maxLabel {
			return fmt.Sprintf("each part between dots has 1 to %d characters", maxLabel)
		}
		if label[0] == '-' || label[len(label)-1] == '-' {
			return "no part between dots begins or ends with -"
		}
		for i := range len(label) {
			switch c := label[i]; {
			case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_':
			case c == '*':
				return "* stands only at the beginning, as *.example.com"
			default:
				return "a host has only a-z, 0-9, -, _ and dots; write another alphabet as xn--…"
			}
		}
	}
	// Resolvers read 127.1, 0x7f.1 and 2130706433 as addresses; whoever means one writes it whole.
	if last := labels[len(labels)-1]; last[0] >= '0' && last[0] <= '9' {
		return "the last part of a name does not begin with a digit; write an address as four numbers"
	}
	return ""
}

// Match tells whether the rule allows a host and port. The host is as a client
// asked for it: a name in any case, or an address without brackets.
func (r Rule) Match(host string, port uint16) bool {
	switch {
	case r.Port == 0 && port != 80 && port != 443:
		return false
	case r.Port != 0 && port != r.Port:
		return false
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if addr, err := netip.ParseAddr(host); err == nil {
		return !r.Subdomain && addr.Unmap().String() == r.Host
	}
	if r.Subdomain {
		below, ok := strings.CutSuffix(host, "."+r.Host)
		return ok && below != ""
	}
	return host == r.Host
}

// String is the rule as an entry.
func (r Rule) String() string {
	s := r.Host
	if strings.Contains(s, ":") {
		s = "[" + s + "]"
	}
	if r.Subdomain {
		s = "*." + s
	}
	if r.Port != 0 {
		s += ":" + strconv.Itoa(int(r.Port))
	}
	return s
}
