package egress

import (
	"fmt"
	"net/netip"
)

// AddressError is returned for an IP address that sandboxes may not reach.
type AddressError struct {
	Addr netip.Addr
	Why  string
}

func (e *AddressError) Error() string { return fmt.Sprintf("%s is %s", e.Addr, e.Why) }

type addressBlock struct {
	prefix netip.Prefix
	why    string
}

// nonPublicBlocks lists the address blocks that are not public, or whose addresses represent other addresses: IANA's
// special-purpose registries (RFC 6890 and its successors), and the forms of IPv6 that contain an IPv4 address. Of two
// overlapping blocks, the smaller one comes first.
var nonPublicBlocks = []addressBlock{
	{netip.MustParsePrefix("169.254.169.254/32"), "the cloud's metadata service"},
	{netip.MustParsePrefix("168.63.129.16/32"), "the cloud's metadata service"}, // Azure's, which looks like a public address
	{netip.MustParsePrefix("fd00:ec2::254/128"), "the cloud's metadata service"},
	{netip.MustParsePrefix("0.0.0.0/8"), "an unspecified address"},
	{netip.MustParsePrefix("10.0.0.0/8"), "a private address"},
	{netip.MustParsePrefix("100.64.0.0/10"), "an address of carrier-grade NAT"},
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address"},
	{netip.MustParsePrefix("169.254.0.0/16"), "a link-local address"},
	{netip.MustParsePrefix("172.16.0.0/12"), "a private address"},
	{netip.MustParsePrefix("192.0.0.0/24"), "a reserved address"},
	{netip.MustParsePrefix("192.0.2.0/24"), "an address of documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a 6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), "a private address"},
	{netip.MustParsePrefix("198.18.0.0/15"), "an address of benchmarks"},
	{netip.MustParsePrefix("198.51.100.0/24"), "an address of documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "an address of documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "a multicast address"},
	{netip.MustParsePrefix("255.255.255.255/32"), "a broadcast address"},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address"},

	{netip.MustParsePrefix("::/128"), "an unspecified address"},
	{netip.MustParsePrefix("::1/128"), "a loopback address"},
	{netip.MustParsePrefix("::/96"), "an IPv4 address in IPv6 form"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "an IPv4 address in IPv6 form"},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "an IPv4 address in IPv6 form"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "an address of local NAT64"},
	{netip.MustParsePrefix("2001:db8::/32"), "an address of documentation"},
	{netip.MustParsePrefix("2001::/32"), "a Teredo address, which carries an IPv4 address"},
	{netip.MustParsePrefix("2001::/23"), "a reserved address"},
	{netip.MustParsePrefix("2002::/16"), "a 6to4 address, which carries an IPv4 address"},
	{netip.MustParsePrefix("3fff::/20"), "an address of documentation"},
	{netip.MustParsePrefix("fc00::/7"), "a private address"},
	{netip.MustParsePrefix("fe80::/10"), "a link-local address"},
	{netip.MustParsePrefix("fec0::/10"), "a site-local address"},
	{netip.MustParsePrefix("ff00::/8"), "a multicast address"},
}

var (
	nat64Prefix      = netip.MustParsePrefix("64:ff9b::/96")
	publicIPv6Prefix = netip.MustParsePrefix("2000::/3") // all of IPv6 that IANA has allocated for public addresses
)

// CheckAddress returns an *AddressError unless an IP address is public. For an address in NAT64's well-known prefix it
// checks the IPv4 address inside.
func CheckAddress(a netip.Addr) error {
	refuse := func(why string) error { return &AddressError{Addr: a, Why: why} }
	switch {
	case !a.IsValid():
		return refuse("no address")
	case a.Zone() != "":
		return refuse("an address with a zone")
	case nat64Prefix.Contains(a):
		b := a.As16()
		if err := CheckAddress(netip.AddrFrom4([4]byte(b[12:]))); err != nil {
			return refuse("a NAT64 address: " + err.Error())
		}
		return nil
	}
	for _, c := range nonPublicBlocks {
		if c.prefix.Contains(a) {
			return refuse(c.why)
		}
	}
	// An ISATAP address has an IPv4 address in its last four bytes.
	if b := a.As16(); a.Is6() && b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe {
		return refuse("an ISATAP address, which carries an IPv4 address")
	}
	if a.Is6() && !publicIPv6Prefix.Contains(a) {
		return refuse("a reserved address")
	}
	return nil
}
