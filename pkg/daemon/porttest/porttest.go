// Package porttest finds free addresses for servers that tests start.
package porttest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreeAddrs returns n addresses of loopback on which no server listens, for settings that cannot be port 0.
// Their ports are below the range from which systems choose ports: a port in that range could be given to
// another program before it is used.
func FreeAddrs(t *testing.T, n int) []string {
	t.Helper()
	var addrs []string
	for range 100 * n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(10000))) //nolint:gosec // no secret depends on it
		if err != nil {
			continue
		}
		defer func() { _ = l.Close() }() // all listeners stay open until the return, so that no two addresses are the same
		if addrs = append(addrs, l.Addr().String()); len(addrs) == n {
			return addrs
		}
	}
	t.Fatalf("found fewer than %d free ports", n)
	return nil
}
