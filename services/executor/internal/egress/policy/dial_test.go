package policy_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/egress"

	"github.com/spoolhq/spool/services/executor/internal/egress/policy"
)

type resolver func(host string) ([]netip.Addr, error)

func (r resolver) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	if r == nil {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return r(host)
}

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestDialer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		host     string
		answers  []string
		closed   string
		down     []string // addresses that do not answer
		dialed   []string
		denied   string // the address of an AddressError
		resolves bool   // false: an UnresolvedError
	}{
		{name: "a name", host: "ok.example", answers: []string{"93.184.216.34"}, dialed: []string{"93.184.216.34:443"}, resolves: true},
		{name: "the resolver's way to write IPv4", host: "ok.example", answers: []string{"::ffff:93.184.216.34"}, dialed: []string{"93.184.216.34:443"}, resolves: true},
		{name: "the second answers", host: "ok.example", answers: []string{"2606:4700::1", "93.184.216.34"}, down: []string{"[2606:4700::1]:443"}, dialed: []string{"[2606:4700::1]:443", "93.184.216.34:443"}, resolves: true},
		{name: "an address", host: "93.184.216.34", dialed: []string{"93.184.216.34:443"}, resolves: true},
		{name: "loopback", host: "ok.example", answers: []string{"127.0.0.1"}, denied: "127.0.0.1", resolves: true},
		{name: "metadata, mapped", host: "ok.example", answers: []string{"::ffff:169.254.169.254"}, denied: "169.254.169.254", resolves: true},
		{name: "one of two is private", host: "ok.example", answers: []string{"93.184.216.34", "10.0.0.1"}, denied: "10.0.0.1", resolves: true},
		{name: "this machine", host: "ok.example", answers: []string{"93.184.215.99"}, denied: "93.184.215.99", resolves: true},
		{name: "closed by the operator", host: "ok.example", answers: []string{"93.184.216.34"}, closed: "93.184.0.0/16", denied: "93.184.216.34", resolves: true},
		{name: "no such name", host: "nowhere.example"},
		{name: "no address", host: "ok.example", answers: []string{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var dialed []string
			cfg := policy.DialerConfig{
				Resolver: resolver(func(host string) ([]netip.Addr, error) {
					if host != "ok.example." {
						return nil, errors.New("no such host")
					}
					return addrs(c.answers...), nil
				}),
				Dial: func(_ context.Context, _, address string) (net.Conn, error) {
					dialed = append(dialed, address)
					if slices.Contains(c.down, address) {
						return nil, errors.New("it is down")
					}
					a, b := net.Pipe()
					b.Close()
					return a, nil
				},
				Own: func() ([]netip.Addr, error) { return addrs("93.184.215.99"), nil },
			}
			if c.closed != "" {
				cfg.Closed = []netip.Prefix{netip.MustParsePrefix(c.closed)}
			}
			conn, err := policy.NewDialer(cfg).Dial(t.Context(), target(t, c.host+":443"))
			if conn != nil {
				conn.Close()
			}
			var address *egress.AddressError
			var unresolved *policy.UnresolvedError
			switch {
			case c.denied != "":
				if !errors.As(err, &address) || address.Addr.String() != c.denied {
					t.Errorf("%v", err)
				}
			case !c.resolves:
				if !errors.As(err, &unresolved) {
					t.Errorf("%v", err)
				}
			case err != nil:
				t.Error(err)
			}
			if !slices.Equal(dialed, c.dialed) {
				t.Errorf("dialed %v, not %v", dialed, c.dialed)
			}
		})
	}
}

// A name that resolves to another address each time is resolved once, and the proxy dials the address that it
// checked.
func TestDial_RefusesARebindingName(t *testing.T) {
	t.Parallel()
	asked := 0
	var dialed []string
	d := policy.NewDialer(policy.DialerConfig{
		Resolver: resolver(func(string) ([]netip.Addr, error) {
			asked++
			if asked == 1 {
				return addrs("93.184.216.34"), nil
			}
			return addrs("127.0.0.1"), nil
		}),
		Dial: func(_ context.Context, _, address string) (net.Conn, error) {
			dialed = append(dialed, address)
			a, b := net.Pipe()
			b.Close()
			return a, nil
		},
	})
	conn, err := d.Dial(t.Context(), target(t, "rebind.example:443"))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if asked != 1 || !slices.Equal(dialed, []string{"93.184.216.34:443"}) {
		t.Errorf("asked %d times, dialed %v", asked, dialed)
	}
	if _, err := d.Dial(t.Context(), target(t, "rebind.example:443")); err == nil || len(dialed) != 1 {
		t.Errorf("the second time: %v, dialed %v", err, dialed)
	}
}

func TestDialer_GivesUp(t *testing.T) {
	t.Parallel()
	d := policy.NewDialer(policy.DialerConfig{Resolver: resolver(nil), Lookup: time.Millisecond})
	var unresolved *policy.UnresolvedError
	if _, err := d.Dial(t.Context(), target(t, "slow.example:443")); !errors.As(err, &unresolved) {
		t.Errorf("a look-up that does not end: %v", err)
	}
	d = policy.NewDialer(policy.DialerConfig{
		Connect: time.Millisecond,
		Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	if _, err := d.Dial(t.Context(), target(t, "93.184.216.34:443")); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "93.184.216.34:443") {
		t.Errorf("a host that does not answer: %v", err)
	}
}

// OwnAddresses returns the addresses of this machine.
func TestOwnAddresses(t *testing.T) {
	t.Parallel()
	list, err := net.InterfaceAddrs()
	if err != nil || len(list) == 0 {
		t.Fatalf("%v, %v", list, err)
	}
	d := policy.NewDialer(policy.DialerConfig{})
	for _, a := range list {
		addr, _ := netip.AddrFromSlice(a.(*net.IPNet).IP)
		if _, err := d.Resolve(t.Context(), egress.Host{Addr: addr.Unmap()}); err == nil {
			t.Errorf("%s is let through", addr)
		}
	}
}
func target(t *testing.T, s string) egress.Target {
	t.Helper()
	got, err := egress.ParseTarget(s, 0)
	if err != nil {
		t.Fatal(err)
	}
	return got
}
