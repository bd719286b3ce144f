package egress_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/egress"
)

func ExampleParseRule() {
	r, err := egress.ParseRule("*.Example.com:8443")
	fmt.Println(r, err, r.Match("API.example.com.", 8443), r.Match("example.com", 8443), r.Match("badexample.com", 8443), r.Match("api.example.com", 443))
	_, err = egress.ParseRule("https://example.com/path")
	fmt.Println(err)
	// Output:
	// *.example.com:8443 <nil> true false false false
	// "https://example.com/path" is no entry of an allowlist: write the host alone, as api.example.com or api.example.com:8443, without scheme, user and path
}

func TestParseRule(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"example.com": "example.com", "Example.COM.": "example.com", "*.example.com": "*.example.com", "a_b.example.com:1": "a_b.example.com:1",
		"localhost:65535": "localhost:65535", "10.0.0.1": "10.0.0.1", "10.0.0.1:80": "10.0.0.1:80", "[2001:DB8::1]:443": "[2001:db8::1]:443", "[::1]": "[::1]",
		"[::ffff:10.0.0.1]": "10.0.0.1", "xn--bcher-kva.example": "xn--bcher-kva.example", "3com.com": "3com.com",
	} {
		r, err := egress.ParseRule(in)
		if err != nil || r.String() != want {
			t.Errorf("%s: got %s, %v; want %s", in, r, err, want)
			continue
		}
		if again, err := egress.ParseRule(r.String()); err != nil || again != r {
			t.Errorf("%s: its text %s reads as %v, %v", in, r, again, err)
		}
	}
	for _, in := range []string{
		"", " ", "*", "*.", "**.example.com", "a.*.com", "*example.com", "example..com", ".example.com", "-a.com", "a-.com", "example.com:", "example.com:0",
		"example.com:65536", "example.com:+1", "example.com:http", "http://example.com", "example.com/x", "user@example.com", "::1", "[::1", "[example.com]:1", "[::1]x",
		"[fe80::1%eth0]", "*.10.0.0.1", "127.1", "2130706433", "0x7f.1", "exämple.com", "a b.com", "a\x00.com", "a\n.com", strings.Repeat("a", 64) + ".com",
		strings.Repeat("a.", 130) + "com",
	} {
		if r, err := egress.ParseRule(in); err == nil || strings.Contains(err.Error(), "\n") || len(err.Error()) > 300 {
			t.Errorf("%q: got %v, %v", in, r, err)
		}
	}
}

func TestMatch(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rule, host string
		port       uint16
		want       bool
	}{
		{"example.com", "example.com", 443, true}, {"example.com", "EXAMPLE.com.", 80, true}, {"example.com", "example.com", 22, false},
		{"example.com", "api.example.com", 443, false}, {"example.com", "example.com.evil.net", 443, false}, {"example.com:22", "example.com", 22, true},
		{"example.com:22", "example.com", 443, false}, {"*.example.com", "a.b.example.com", 443, true}, {"*.example.com", ".example.com", 443, false},
		{"10.0.0.1", "::ffff:10.0.0.1", 80, true}, {"10.0.0.1", "10.0.0.10", 80, false},
	} {
		r, err := egress.ParseRule(c.rule)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Match(c.host, c.port); got != c.want {
			t.Errorf("%s matches %s:%d: %v, want %v", c.rule, c.host, c.port, got, c.want)
		}
	}
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"example.com", "*.a:1", "[::1]:2", "10.0.0.1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := egress.ParseRule(s)
		if err != nil {
			return
		}
		if again, err := egress.ParseRule(r.String()); err != nil || again != r {
			t.Errorf("%q reads as %+v, its text %q as %+v, %v", s, r, r, again, err)
		}
	})
}
