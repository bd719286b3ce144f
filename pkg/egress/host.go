// Package egress parses hosts and allowlists, and checks addresses: it determines where a sandbox may connect to. It is
// pure. The public API and the egress proxy both use it, so they accept the same allowlists.
package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/pkg/truncate"
)

// Host is a host in canonical form: a host name in lower case without a trailing dot, or an IP address.
type Host struct {
	Name string     // "" for an address
	Addr netip.Addr // invalid for a name
}

// String returns the host as in a URL, without brackets.
func (h Host) String() string {
	if h.Name != "" {
		return h.Name
	}
	return h.Addr.String()
}

// HostError is returned for a text that is not a valid host.
type HostError struct {
	Host   string // as it was given, made printable
	Reason string
}

func (e *HostError) Error() string { return fmt.Sprintf("%s is not a host: %s", e.Host, e.Reason) }

// Limits of DNS, RFC 1035 section 2.3.4.
const (
	maxHostNameLength = 253
	maxLabelLength    = 63
)

// ParseHost parses a host name or an IP address as in a URL, IPv6 addresses in brackets. It accepts only one form of
// each host: no IPv4 address in short, octal, hexadecimal or plain number form, no zone, no IPv4-mapped IPv6 address,
// and no character except letters, digits, hyphen, underscore and dot. The error is a *HostError.
func ParseHost(s string) (Host, error) {
	h, err := parseHost(s)
	if err != nil {
		return Host{}, &HostError{Host: QuotePrefix(s), Reason: err.Error()}
	}
	return h, nil
}

func parseHost(s string) (Host, error) {
	if inner, ok := strings.CutPrefix(s, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if !ok {
			return Host{}, errors.New("the bracket is not closed")
		}
		return parseIPv6(inner)
	}
	if strings.Contains(s, ":") {
		return Host{}, errors.New("an IPv6 address must be in brackets")
	}
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	switch {
	case name == "":
		return Host{}, errors.New("is empty")
	case len(name) > maxHostNameLength:
		return Host{}, fmt.Errorf("is longer than %d characters", maxHostNameLength)
	}
	labels := strings.Split(name, ".")
	for _, l := range labels {
		if err := checkLabel(l); err != nil {
			return Host{}, err
		}
	}
	if !isNumericLabel(labels[len(labels)-1]) {
		return Host{Name: name}, nil
	}
	addr, err := netip.ParseAddr(name)
	if err != nil || addr.String() != name {
		return Host{}, errors.New("ends in a number, so must be an address of four decimal numbers")
	}
	return Host{Addr: addr}, nil
}

func parseIPv6(s string) (Host, error) {
	if strings.Contains(s, "%") {
		return Host{}, errors.New("an address with a zone is not public")
	}
	addr, err := netip.ParseAddr(s)
	switch {
	case err != nil || !addr.Is6():
		return Host{}, errors.New("must have an IPv6 address in the brackets")
	case addr.Is4In6():
		return Host{}, errors.New("an IPv4 address must be written as four decimal numbers, not as IPv6")
	}
	return Host{Addr: addr}, nil
}

func checkLabel(l string) error {
	switch {
	case l == "":
		return errors.New("must not have an empty part between dots")
	case len(l) > maxLabelLength:
		return fmt.Errorf("a part is longer than %d characters", maxLabelLength)
	case l[0] == '-' || l[len(l)-1] == '-':
		return errors.New("a part begins or ends with a hyphen")
	}
	for i := range len(l) {
		c := l[i]
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_':
		case c >= 0x80:
			return errors.New("has characters beyond ASCII; write an international name in its xn-- form")
		default:
			return fmt.Errorf("must not have the character %q", c)
		}
	}
	return nil
}

// isNumericLabel reports whether some parsers read a host whose last label is l as an IPv4 address: l has only decimal
// digits, or hexadecimal digits after 0x.
func isNumericLabel(l string) bool {
	if hex, ok := strings.CutPrefix(l, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(l, "0123456789") == ""
}

// Target is a host and a port to which a sandbox asks to connect, or may connect.
type Target struct {
	Host Host
	Port uint16
}

// String returns the target as an authority, host:port.
func (t Target) String() string { return net.JoinHostPort(t.Host.String(), strconv.Itoa(int(t.Port))) }

// ParseTarget parses host:port. If assume is not 0, the port may be missing and assume is used instead.
func ParseTarget(authority string, assume uint16) (Target, error) {
	host, port := authority, ""
	if i := strings.LastIndexByte(authority, ':'); i >= 0 && i > strings.LastIndexByte(authority, ']') {
		host, port = authority[:i], authority[i+1:]
	}
	h, err := ParseHost(host)
	if err != nil {
		return Target{}, err
	}
	if port == "" && assume != 0 && host == authority {
		return Target{Host: h, Port: assume}, nil
	}
	n, err := parsePort(port)
	if err != nil {
		return Target{}, &HostError{Host: QuotePrefix(authority), Reason: err.Error()}
	}
	return Target{Host: h, Port: n}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != s {
		return 0, errors.New("the port must be a number between 1 and 65535")
	}
	return uint16(n), nil
}

// QuotePrefix returns the first 100 bytes of an untrusted text, quoted for messages.
func QuotePrefix(s string) string { return truncate.Quote(s, 100) }
