package settingstest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreeAddrs finds n addresses of loopback that nobody listens on, for settings that cannot be port 0.
// They lie below the ports that systems give out by themselves: one of those
// could be given to somebody else before it is used.
func FreeAddrs(t *testing.T, n int) []string {
	t.Helper()
	var addrs []string
	for range 100 * n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(10000))) //nolint:gosec // not for a secret
		if err != nil {
			continue
		}
		defer func() { _ = l.Close() }() // at the end, so that no two are the same
		if addrs = append(addrs, l.Addr().String()); len(addrs) == n {
			return addrs
		}
	}
	t.Fatalf("there are no %d free ports", n)
	return nil
}
