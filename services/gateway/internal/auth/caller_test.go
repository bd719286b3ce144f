package auth_test

import (
	"testing"

	"github.com/spoolhq/spool/services/gateway/internal/auth"
)

func TestClient_BelievesOnlyTrustedProxies(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		trusted   []string
		any       bool
		peer      string
		forwarded []string
		want      string
	}{
		"a forged header of a client":             {nil, false, "192.0.2.1:5", []string{"203.0.113.9"}, "192.0.2.1"},
		"a forged header from an untrusted peer":  {[]string{"10.0.0.0/8"}, false, "192.0.2.1:5", []string{"203.0.113.9"}, "192.0.2.1"},
		"what a trusted proxy states":             {[]string{"10.0.0.0/8"}, false, "10.1.2.3:5", []string{"203.0.113.9"}, "203.0.113.9"},
		"what the client put before its own hop":  {[]string{"10.0.0.0/8"}, false, "10.1.2.3:5", []string{"1.1.1.1, 203.0.113.9"}, "203.0.113.9"},
		"two headers, of which the proxy's last":  {[]string{"10.1.2.3"}, false, "10.1.2.3:5", []string{"1.1.1.1", "203.0.113.9"}, "203.0.113.9"},
		"two trusted proxies":                     {[]string{"10.0.0.0/8"}, false, "10.1.2.3:5", []string{"1.1.1.1, 203.0.113.9, 10.9.9.9"}, "203.0.113.9"},
		"every connection from a proxy, last hop": {nil, true, "10.1.2.3:5", []string{"1.1.1.1, 203.0.113.9"}, "203.0.113.9"},
		"any proxy, and one that is trusted":      {[]string{"203.0.113.0/24"}, true, "10.1.2.3:5", []string{"1.1.1.1, 203.0.113.9"}, "1.1.1.1"},
		"a proxy that states nothing":             {nil, true, "10.1.2.3:5", nil, "10.1.2.3"},
		"a proxy that states no address":          {nil, true, "10.1.2.3:5", []string{"unknown"}, "10.1.2.3"},
		"a hop with a port":                       {nil, true, "10.1.2.3:5", []string{"203.0.113.9:4711"}, "203.0.113.9"},
		"IPv6 with a port":                        {nil, true, "[fe80::1%eth0]:5", []string{"[2001:db8::1]:4711"}, "2001:db8::1"},
		"an IPv6 peer with a zone":                {nil, false, "[fe80::1%eth0]:5", nil, "fe80::1"},
		"IPv4 in IPv6":                            {[]string{"10.0.0.0/8"}, false, "[::ffff:10.1.2.3]:5", []string{"::ffff:203.0.113.9"}, "203.0.113.9"},
		"a peer without an address":               {nil, false, "@", nil, ""},
	} {
		p, err := auth.ParseProxies(c.trusted)
		if err != nil {
			t.Fatal(err)
		}
		if p.Any = c.any; p.ClientIP(c.peer, c.forwarded) != c.want {
			t.Errorf("%s: %s, want %s", name, p.ClientIP(c.peer, c.forwarded), c.want)
		}
	}
	for _, bad := range []string{"", "proxy.example", "10.0.0.0/33", "10.0.0"} {
		if _, err := auth.ParseProxies([]string{bad}); err == nil {
			t.Errorf("%q was accepted as a network", bad)
		}
	}
}
