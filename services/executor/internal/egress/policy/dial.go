// Package policy dials for a sandbox: exactly the address that was looked at and
// found to be anybody's to reach.
package policy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
)

// Resolver looks names up. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// DialerConfig is what a Dialer needs; the zero value takes every default.
type DialerConfig struct {
	Resolver Resolver                                                             // nil for the system's
	Dial     func(ctx context.Context, network, address string) (net.Conn, error) // nil for the system's; address is always a literal one
	Own      func() ([]netip.Addr, error)                                         // addresses of this machine, never reached; nil asks the machine
	Closed   []netip.Prefix                                                       // more addresses that are never reached
	Lookup   time.Duration                                                        // for a name; 0 means 10 s
	Connect  time.Duration                                                        // for each address; 0 means 10 s
}

// Dialer connects to what sandboxes name. It looks a name up once, refuses it if
// any of its addresses is not public, and connects to one of those addresses: a
// name whose answer changes in between gains nothing.
type Dialer struct{ cfg DialerConfig }

// NewDialer makes a Dialer.
func NewDialer(cfg DialerConfig) *Dialer {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	if cfg.Own == nil {
		cfg.Own = ownAddresses
	}
	if cfg.Lookup == 0 {
		cfg.Lookup = 10 * time.Second
	}
	if cfg.Connect == 0 {
		cfg.Connect = 10 * time.Second
	}
	return &Dialer{cfg: cfg}
}

// UnresolvedError is a name without an address.
type UnresolvedError struct {
	Host string
	Err  error
}

func (e *UnresolvedError) Error() string { return fmt.Sprintf("look up %s: %v", e.Host, e.Err) }

func (e *UnresolvedError) Unwrap() error { return e.Err }

// Resolve gives the addresses of a host, all of them public. The error is an
// *UnresolvedError, or an *egress.AddressError for the first address that is not.
func (d *Dialer) Resolve(ctx context.Context, h egress.Host) ([]netip.Addr, error) {
	addrs := []netip.Addr{h.Addr}
	if h.Name != "" {
		ctx, cancel := context.WithTimeout(ctx, d.cfg.Lookup)
		defer cancel()
		var err error
		// The dot keeps the machine's search domains out of it.
		if addrs, err = d.cfg.Resolver.LookupNetIP(ctx, "ip", h.Name+"."); err != nil {
			return nil, &UnresolvedError{Host: h.Name, Err: err}
		}
		if len(addrs) == 0 {
			return nil, &UnresolvedError{Host: h.Name, Err: errors.New("it has no address")}
		}
	}
	own, err := d.cfg.Own()
	if err != nil {
		return nil, fmt.Errorf("addresses of this machine: %w", err)
	}
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		// The system's resolver gives IPv4 addresses in the form of IPv6; nothing is hidden by taking that off.
		a = a.Unmap()
		if err := egress.CheckAddress(a); err != nil {
			return nil, err
		}
		if slices.Contains(own, a) {
			return nil, &egress.AddressError{Addr: a, Why: "an address of the proxy's own machine"}
		}
		for _, p := range d.cfg.Closed {
			if p.Contains(a) {
				return nil, &egress.AddressError{Addr: a, Why: "in " + p.String() + ", which is closed here"}
			}
		}
		out = append(out, a)
	}
	return out, nil
}

// Dial resolves a target and connects to the first of its addresses that answers.
func (d *Dialer) Dial(ctx context.Context, t egress.Target) (net.Conn, error) {
	addrs, err := d.Resolve(ctx, t.Host)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, a := range addrs {
		conn, err := d.connect(ctx, netip.AddrPortFrom(a, t.Port))
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("connect to %s: %w", t, errors.Join(errs...))
}

func (d *Dialer) connect(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Connect)
	defer cancel()
	return d.cfg.Dial(ctx, "tcp", to.String())
}

// ownAddresses are those of this machine's network interfaces.
func ownAddresses() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, addr.Unmap())
			}
		}
	}
	return out, nil
}
