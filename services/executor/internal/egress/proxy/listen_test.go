package proxy

import (
	"net"
	"slices"
	"testing"
)

// from is a connection with an address that records its close.
type from struct {
	net.Conn
	address string
	closed  bool
}

func (f *from) RemoteAddr() net.Addr {
	a, err := net.ResolveTCPAddr("tcp", f.address)
	if err != nil {
		return &net.UnixAddr{Name: f.address, Net: "unix"}
	}
	return a
}

func (f *from) Close() error {
	f.closed = true
	return nil
}

func TestPendingConns_CloseTheOldestOfAnAddressWithTooMany(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		addresses []string
		closed    []int
	}{
		"one address":                 {[]string{"192.0.2.1:1", "192.0.2.1:2", "192.0.2.1:3", "192.0.2.1:4"}, []int{0, 1}},
		"an older one of another":     {[]string{"192.0.2.9:1", "192.0.2.1:1", "192.0.2.1:2", "192.0.2.1:3"}, []int{1}},
		"an IPv6 network":             {[]string{"[2001:db8:0:1::1]:1", "[2001:db8:0:1::2]:1", "[2001:db8:0:1:ffff::]:1"}, []int{0}},
		"IPv6 networks":               {[]string{"[2001:db8:0:1::1]:1", "[2001:db8:0:2::1]:1", "[2001:db8:0:3::1]:1"}, nil},
		"an IPv4 address in two ways": {[]string{"192.0.2.1:1", "[::ffff:192.0.2.1]:2", "192.0.2.1:3"}, []int{0}},
	} {
		a := newPendingConns(2)
		var conns []*from
		for _, address := range c.addresses {
			conns = append(conns, &from{address: address})
			a.add(conns[len(conns)-1])
		}
		var closed []int
		for i, conn := range conns {
			if conn.closed {
				closed = append(closed, i)
			}
		}
		if !slices.Equal(closed, c.closed) {
			t.Errorf("%s: closed %v, want %v", name, closed, c.closed)
		}
	}
}

func TestPendingConns_CloseTheOldestOfTooMany(t *testing.T) {
	t.Parallel()
	a := newPendingConns(0)
	first, second := &from{address: "/a"}, &from{address: "/b"}
	gone, _ := a.add(first)
	at, _ := a.add(second)
	if a.remove(at) {
		t.Error("one that has said whose it is was evicted")
	}
	for range maxUnidentifiedConns {
		a.add(&from{address: "/c"})
	}
	if !first.closed || second.closed || !a.remove(gone) || a.list.Len() != maxUnidentifiedConns {
		t.Errorf("%v, %v, %d pending", first.closed, second.closed, a.list.Len())
	}
}
