package egress_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/egress"
)

func ExampleParseAllowlist() {
	list, err := egress.ParseAllowlist([]string{"*.Example.com:8443"})
	if err != nil {
		panic(err)
	}
	for _, authority := range []string{"API.example.com.:8443", "example.com:8443", "badexample.com:8443", "api.example.com:443"} {
		t, err := egress.ParseTarget(authority, 0)
		fmt.Println(t, err, list.Allows(t))
	}
	_, err = egress.ParseAllowlist([]string{"https://example.com/path"})
	fmt.Println(err)
	// Output:
	// api.example.com:8443 <nil> true
	// example.com:8443 <nil> false
	// badexample.com:8443 <nil> false
	// api.example.com:443 <nil> false
	// allow[0]: "https://example.com/path": it is a URL or a network, not a host; an entry is host, host:port or *.host
}

// TestEntries: what an entry may look like.
func TestEntries(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		"example.com", "Example.COM.", "*.example.com", "a_b.example.com:1", "localhost:65535", "9.9.9.9", "9.9.9.9:80",
		"[2606:4700::1]:443", "[2606:4700::1]", "xn--bcher-kva.example", "3com.com",
	} {
		if _, err := egress.ParseAllowlist([]string{in}); err != nil {
			t.Errorf("%s: %v", in, err)
		}
	}
	for _, in := range []string{
		"", " ", "*", "*.", "**.example.com", "a.*.com", "*example.com", "example..com", ".example.com", "-a.com", "a-.com", "example.com:", "example.com:0",
		"example.com:65536", "example.com:+1", "example.com:http", "http://example.com", "example.com/x", "user@example.com", "::1", "[::1", "[example.com]:1", "[::1]x",
		"[fe80::1%eth0]", "*.10.0.0.1", "127.1", "2130706433", "0x7f.1", "ex\u00e4mple.com", "a b.com", "a\x00.com", "a\n.com", strings.Repeat("a", 64) + ".com",
		strings.Repeat("a.", 130) + "com",
		// Nothing could reach these, whatever an allowlist says.
		"10.0.0.1", "10.0.0.1:80", "[::1]", "[::ffff:10.0.0.1]", "[2001:DB8::1]:443", "169.254.169.254",
	} {
		if _, err := egress.ParseAllowlist([]string{in}); err == nil || strings.Contains(err.Error(), "\n") || len(err.Error()) > 400 {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// TestAllows: what an entry matches.
func TestAllows(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rule, target string
		want         bool
	}{
		{"example.com", "example.com:443", true}, {"example.com", "EXAMPLE.com.:80", true}, {"example.com", "example.com:22", false},
		{"example.com", "api.example.com:443", false}, {"example.com", "example.com.evil.net:443", false}, {"example.com:22", "example.com:22", true},
		{"example.com:22", "example.com:443", false}, {"*.example.com", "a.b.example.com:443", true},
		{"9.9.9.9", "9.9.9.9:80", true}, {"9.9.9.9", "9.9.9.90:80", false},
	} {
		list, err := egress.ParseAllowlist([]string{c.rule})
		if err != nil {
			t.Fatal(err)
		}
		at, err := egress.ParseTarget(c.target, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := list.Allows(at); got != c.want {
			t.Errorf("%s allows %s: %v, want %v", c.rule, c.target, got, c.want)
		}
	}
}
