package egress_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
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
	// allow[0]: "https://example.com/path": must be a host, not a URL or a network; an entry is host, host:port or *.host, optionally after methods and a space: GET,HEAD api.example.com
}

// TestParseRule_AcceptsAndRefuses tests the syntax of an entry.
func TestParseRule_AcceptsAndRefuses(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		"example.com", "Example.COM.", "*.example.com", "a_b.example.com:1", "localhost:65535", "9.9.9.9", "9.9.9.9:80",
		"[2606:4700::1]:443", "[2606:4700::1]", "xn--bcher-kva.example", "3com.com",
		"GET example.com", "GET,HEAD,PROPFIND *.example.com:8443", "M-SEARCH [2606:4700::1]:443", strings.Repeat("A", 32) + " example.com",
		"provider:web_search", "provider:url", "provider:443",
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
		// Methods are in upper case and listed once, with one comma between them and one space after them.
		"get example.com", "Get example.com", "GET  example.com", " GET example.com", "GET example.com ", "GET, HEAD example.com", "GET,,HEAD example.com", ",GET example.com",
		"GET, example.com", "GET ", "GET\texample.com", "GET,GET example.com", "CONNECT example.com", "GET,TRACE example.com", "G\u00c9T example.com", "G3T example.com",
		"* example.com", "-GET example.com", "GET HEAD example.com", "GET http://example.com", "GET *", "example.com GET", strings.Repeat("A", 33) + " example.com",
		"J,K,L,M,N,O,P,Q,A,B,C,D,E,F,G,H,I example.com", "GET 10.0.0.1",
		"provider:", "provider:telepathy", "provider:Web_search", "provider:web_search:443", "GET provider:web_search", "*.provider:web_search",
		// An entry for these addresses is refused, because the proxy never connects to them.
		"10.0.0.1", "10.0.0.1:80", "[::1]", "[::ffff:10.0.0.1]", "[2001:DB8::1]:443", "169.254.169.254",
	} {
		if _, err := egress.ParseAllowlist([]string{in}); err == nil || strings.Contains(err.Error(), "\n") || len(err.Error()) > 450 {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// TestAllows_MatchesHostsAndPorts tests which targets an entry matches.
func TestAllows_MatchesHostsAndPorts(t *testing.T) {
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

// TestAccess_CombinesEntriesByMethod tests which methods the entries of a list allow together.
func TestAccess_CombinesEntriesByMethod(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		entries   []string
		target    string
		all       bool
		methods   string
		selective bool
	}{
		{"one without methods", []string{"example.com"}, "example.com:443", true, "", false},
		{"methods", []string{"HEAD,GET example.com"}, "example.com:80", false, "GET HEAD", true},
		{"methods of two entries", []string{"GET example.com", "POST,GET example.com:443"}, "example.com:443", false, "GET POST", true},
		{"of another port", []string{"GET example.com", "POST example.com:8443"}, "example.com:443", false, "GET", true},
		{"of a wildcard too", []string{"GET api.example.com", "PUT *.example.com", "DELETE *.api.example.com"}, "api.example.com:443", false, "GET PUT", true},
		{"of two wildcards", []string{"GET *.b.example.com", "PUT *.example.com"}, "a.b.example.com:443", false, "GET PUT", true},
		{"one without methods wins", []string{"GET example.com", "example.com"}, "example.com:443", true, "", true},
		{"a wildcard without methods wins", []string{"GET api.example.com", "*.example.com"}, "api.example.com:443", true, "", true},
		{"one without methods of another port does not", []string{"GET example.com", "example.com:8443"}, "example.com:443", false, "GET", true},
		{"nothing", []string{"GET example.com"}, "example.org:443", false, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			list, err := egress.ParseAllowlist(c.entries)
			if err != nil {
				t.Fatal(err)
			}
			got := list.Access(target(t, c.target))
			if got.AllowsAll() != c.all || strings.Join(got.Methods(), " ") != c.methods || got.AllowsAny() != (c.all || c.methods != "") || list.RestrictsMethods() != c.selective {
				t.Errorf("%+v, selective %v", got, list.RestrictsMethods())
			}
			for _, m := range []string{"GET", "POST", "get", "", "GET "} {
				if want := c.all || m != "" && strings.Contains(" "+c.methods+" ", " "+m+" "); got.Allows(m) != want {
					t.Errorf("%q: %v", m, !want)
				}
			}
		})
	}
}

// TestUnion_KeepsTheFirstLayerOfAnEntry tests that an entry belongs to the first layer that contains it, in any
// spelling.
func TestUnion_KeepsTheFirstLayerOfAnEntry(t *testing.T) {
	t.Parallel()
	got, err := egress.MergeEntries(4,
		egress.SourceEntries{From: "session", Entries: []string{"B.example.com.", "HEAD,GET a.example.com:443"}},
		egress.SourceEntries{From: "ci@1", Entries: []string{"GET,HEAD A.example.com:443", "c.example.com"}},
		egress.SourceEntries{From: "none"},
		egress.SourceEntries{From: "ci@2", Entries: []string{"b.example.com", "a.example.com:443"}},
	)
	if want := "[{b.example.com session} {GET,HEAD a.example.com:443 session} {c.example.com ci@1} {a.example.com:443 ci@2}]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, %v", got, err)
	}
	var wrong *egress.SourceError
	_, err = egress.MergeEntries(2, egress.SourceEntries{From: "a", Entries: []string{"a.com", "b.com"}}, egress.SourceEntries{From: "b", Entries: []string{"a.com", "c.com"}})
	if !errors.As(err, &wrong) || wrong.From != "b" || !strings.Contains(err.Error(), "more than 2") {
		t.Errorf("too many: %v", err)
	}
	_, err = egress.MergeEntries(2, egress.SourceEntries{From: "a", Entries: []string{"a.com", "get b.com"}})
	if !errors.As(err, &wrong) || wrong.From != "a" || !strings.Contains(err.Error(), `allow[1]: "get b.com"`) {
		t.Errorf("invalid entry: %v", err)
	}
}

// FuzzParseRule tests that every accepted rule has one spelling, that this spelling is accepted as the same rule, and
// that the rule allows only its methods.
func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"ok.com", "GET ok.com", "HEAD,GET *.Ok.com.:8443", "GET [2606:4700::1]:443", "GET 8.8.8.8", "get ok.com", "GET  ok.com", "GET,GET ok.com", "TRACE ok.com", ", ok.com"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := egress.ParseRule(s)
		if err != nil {
			return
		}
		again, err := egress.ParseRule(r.String())
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%q is %q, which is %+v, %v", s, r, again, err)
		}
		if (len(r.Methods) > 0) != strings.Contains(s, " ") || !slices.IsSorted(r.Methods) {
			t.Fatalf("%q has the methods %q", s, r.Methods)
		}
		list, err := egress.ParseAllowlist([]string{s})
		if err != nil {
			t.Fatalf("%q is a rule and no allowlist: %v", s, err)
		}
		at := egress.Target{Host: r.Host, Port: r.Port}
		if r.Port == 0 {
			at.Port = 443
		}
		if r.Below {
			at.Host.Name = "x." + at.Host.Name
		}
		if a := list.Access(at); !a.AllowsAny() || a.Allows("SPOOL") != (len(r.Methods) == 0 || slices.Contains(r.Methods, "SPOOL")) || a.Allows("TRACE") != (len(r.Methods) == 0) {
			t.Fatalf("%q allows %+v of %s", s, a, at)
		}
	})
}
