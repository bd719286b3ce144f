// Package policy connects to hosts for sandboxes. It connects only to addresses that it has resolved and checked to be public.
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

// Resolver resolves host names to addresses. *net.Resolver implements it.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// DialerConfig configures a Dialer. A zero field means its default.
type DialerConfig struct {
	Resolver Resolver                                                             // nil means the system's
	Dial     func(ctx context.Context, network, address string) (net.Conn, error) // gets a literal IP address and a port; nil means the system's
	Own      func() ([]netip.Addr, error)                                         // returns addresses of this machine, which are refused; nil means those of its interfaces
	Closed   []netip.Prefix                                                       // further addresses that are refused
	Lookup   time.Duration                                                        // limit for the resolution of a name; 0 means 10 s
	Connect  time.Duration                                                        // limit for the connection to each address; 0 means 10 s
}

// Dialer connects to hosts that sandboxes name. It resolves the name of a host once, refuses the host if one of its addresses is not
// public, and connects to one of the checked addresses. So DNS rebinding, which changes a name's addresses between check and
// connection, has no effect.
type Dialer struct{ cfg DialerConfig }

// NewDialer returns a Dialer.
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

// UnresolvedError is returned for a host name that does not resolve to an address.
type UnresolvedError struct {
	Host string
	Err  error
}

func (e *UnresolvedError) Error() string { return fmt.Sprintf("look up %s: %v", e.Host, e.Err) }

func (e *UnresolvedError) Unwrap() error { return e.Err }

// Resolve returns the addresses of a host, all of which are public. The error is an *UnresolvedError, or an *egress.AddressError if
// one of the addresses is refused.
func (d *Dialer) Resolve(ctx context.Context, h egress.Host) ([]netip.Addr, error) {
	addrs := []netip.Addr{h.Addr}
	if h.Name != "" {
		ctx, cancel := context.WithTimeout(ctx, d.cfg.Lookup)
		defer cancel()
		var err error
		// With the trailing dot the resolver does not append the machine's search domains.
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
		// The system's resolver returns IPv4 addresses in their IPv6-mapped form.
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

// Dial resolves the host of a target, and connects to the first of the addresses that accepts a connection.
func (d *Dialer) Dial(ctx context.Context, t egress.Target) (net.Conn, error) {
	addrs, err := d.Resolve(ctx, t.Host)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, a := range addrs {
		conn, err := d.dialAddress(ctx, netip.AddrPortFrom(a, t.Port))
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

// dialAddress connects to one address.
func (d *Dialer) dialAddress(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Connect)
	defer cancel()
	return d.cfg.Dial(ctx, "tcp", to.String())
}

// ownAddresses returns the addresses of this machine's network interfaces.
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
