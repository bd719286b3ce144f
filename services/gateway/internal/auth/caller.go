package auth

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// HeaderUser is the header that names the end user on whose behalf the holder of the key sends a request.
const HeaderUser = "Spool-User"

// ParseUser returns the end user that the values of HeaderUser name, or "" for none. name is the name of the header
// or gRPC metadata, for errors. The holder of the API key asserts the user; the gateway cannot verify it.
func ParseUser(name string, values []string) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	user := strings.TrimSpace(values[0])
	switch {
	case len(values) > 1:
		return "", problem.Invalid(name, "the header is set %d times; send it once", len(values))
	case len(user) > events.MaxUserBytes:
		return "", problem.Invalid(name, "value has %d bytes; the limit is %d", len(user), events.MaxUserBytes)
	case !utf8.ValidString(user):
		return "", problem.Invalid(name, "value is not valid UTF-8")
	case strings.ContainsFunc(user, func(r rune) bool { return !unicode.IsPrint(r) }):
		return "", problem.Invalid(name, "value has characters that are not printable")
	}
	return user, nil
}

// TrustedProxies are the reverse proxies whose header X-Forwarded-For is believed. The zero value believes none.
type TrustedProxies struct {
	Networks []netip.Prefix // networks of proxies
	Any      bool           // every connection comes from a proxy
}

// ParseProxies parses the addresses of trusted proxies: IP addresses, and networks in CIDR notation.
func ParseProxies(list []string) (p TrustedProxies, err error) {
	for _, s := range list {
		network, err := netip.ParsePrefix(s)
		if err != nil {
			addr, err := netip.ParseAddr(s)
			if err != nil {
				return p, fmt.Errorf("trusted-proxies: %.64q is neither an IP address nor a network such as 10.0.0.0/8", s)
			}
			network = netip.PrefixFrom(addr, addr.BitLen())
		}
		p.Networks = append(p.Networks, network.Masked())
	}
	return p, nil
}

// ClientIP returns the IP address of a request's client. peer is the address of the TCP peer, host:port, and forwarded
// the values of X-Forwarded-For. The result is the peer's address unless the peer is a proxy: then it is the last
// hop, or the hop before it if that is a proxy too, and so on. The result is "" if the peer has no IP address.
func (p TrustedProxies) ClientIP(peer string, forwarded []string) string {
	from, err := netip.ParseAddrPort(peer)
	if err != nil {
		return ""
	}
	client := withoutZone(from.Addr())
	hops := strings.Split(strings.Join(forwarded, ","), ",")
	for i := len(hops) - 1; i >= 0; i-- {
		if !p.contains(client) && !(p.Any && i == len(hops)-1) {
			break
		}
		hop, ok := parseHop(strings.TrimSpace(hops[i]))
		if !ok {
			break
		}
		client = hop
	}
	return client.String()
}

// IsHTTPS reports whether the client of a request uses TLS, as a trusted proxy states in X-Forwarded-Proto. peer is the
// address of the TCP peer, host:port, and proto the values of the header.
func (p TrustedProxies) IsHTTPS(peer string, proto []string) bool {
	from, err := netip.ParseAddrPort(peer)
	if err != nil || !p.Any && !p.contains(withoutZone(from.Addr())) {
		return false
	}
	hops := strings.Split(strings.Join(proto, ","), ",")
	return strings.EqualFold(strings.TrimSpace(hops[len(hops)-1]), "https")
}

// contains reports whether an address is that of a trusted proxy.
func (p TrustedProxies) contains(a netip.Addr) bool {
	return slices.ContainsFunc(p.Networks, func(n netip.Prefix) bool { return n.Contains(a) })
}

// parseHop parses one entry of X-Forwarded-For: an IP address, to which some proxies add a port.
func parseHop(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return withoutZone(a), true
	}
	a, err := netip.ParseAddrPort(s)
	return withoutZone(a.Addr()), err == nil
}

// withoutZone returns the address without a zone, and as IPv4 if it is an IPv4-mapped address.
func withoutZone(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
