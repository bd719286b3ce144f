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

// HeaderUser is the header in which the holder of a key names the end user of the application for whom a request is.
const HeaderUser = "Spool-User"

// User reads the values of HeaderUser, or of the metadata of gRPC of a name; "" for none. The key's holder asserts it: nobody checks it.
func User(name string, values []string) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	user := strings.TrimSpace(values[0])
	switch {
	case len(values) > 1:
		return "", problem.Invalid(name, "it is there %d times; send it once", len(values))
	case len(user) > events.MaxUser:
		return "", problem.Invalid(name, "it has %d bytes; at most %d are taken", len(user), events.MaxUser)
	case !utf8.ValidString(user):
		return "", problem.Invalid(name, "it is not valid UTF-8")
	case strings.ContainsFunc(user, func(r rune) bool { return !unicode.IsPrint(r) }):
		return "", problem.Invalid(name, "it has characters that cannot be printed")
	}
	return user, nil
}

// Proxies says whose statement of a client's address is believed. The zero Proxies believes nobody.
type Proxies struct {
	Networks []netip.Prefix // of proxies
	Any      bool           // every connection comes from a proxy
}

// ParseProxies reads addresses and networks in CIDR notation.
func ParseProxies(list []string) (p Proxies, err error) {
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

// Client returns the IP address of a request's client, given the address of its TCP peer, host:port, and the values of X-Forwarded-For. It
// is the peer's own unless the peer is a proxy: then the last hop, and the hop before it while that is a proxy too. It is "" for a peer
// without an IP address.
func (p Proxies) Client(peer string, forwarded []string) string {
	from, err := netip.ParseAddrPort(peer)
	if err != nil {
		return ""
	}
	client := bare(from.Addr())
	hops := strings.Split(strings.Join(forwarded, ","), ",")
	for i := len(hops) - 1; i >= 0; i-- {
		if !p.has(client) && !(p.Any && i == len(hops)-1) {
			break
		}
		hop, ok := address(strings.TrimSpace(hops[i]))
		if !ok {
			break
		}
		client = hop
	}
	return client.String()
}

func (p Proxies) has(a netip.Addr) bool {
	return slices.ContainsFunc(p.Networks, func(n netip.Prefix) bool { return n.Contains(a) })
}

// address reads a hop: an address, which some proxies write with a port.
func address(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return bare(a), true
	}
	a, err := netip.ParseAddrPort(s)
	return bare(a.Addr()), err == nil
}

// bare is an address without a zone, and as IPv4 where it is one.
func bare(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
