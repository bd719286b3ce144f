package egress_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/egress"
)

func TestParseHost_NormalizesAndRefuses(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"ok.com": "ok.com", "OK.Com": "ok.com", "ok.com.": "ok.com", "a_b.ok.com": "a_b.ok.com", "xn--bcher-kva.example": "xn--bcher-kva.example",
		"localhost": "localhost", "1.example": "1.example", "0x7f.example": "0x7f.example", "8.8.8.8": "8.8.8.8", "8.8.8.8.": "8.8.8.8",
		"[2606:4700::1111]": "2606:4700::1111", "[::1]": "::1", "127.0.0.1": "127.0.0.1",
	} {
		if h, err := egress.ParseHost(in); err != nil || h.String() != want {
			t.Errorf("%q: %q, %v; want %q", in, h, err, want)
		}
	}
	for name, in := range map[string]string{
		"empty": "", "dot": ".", "two dots": "ok..com", "two at the end": "ok.com..", "one before": ".ok.com",
		"NUL": "ok.com\x00evil", "space": "ok.com evil", "newline": "ok.com\nevil", "tab": "ok.com\t", "slash": "ok.com/evil", "backslash": `ok.com\evil`,
		"at": "ok.com@evil", "percent": "ok%2ecom", "hash": "ok.com#evil", "question": "ok.com?evil", "comma": "ok.com,evil", "star": "*.ok.com",
		"international": "bücher.example", "full-width digits": "１２７.0.0.1", "ideographic dot": "ok。com", "not UTF-8": "ok\xff.com", "DEL": "ok.com\x7f",
		"hyphen first": "-ok.com", "hyphen last": "ok-.com", "long label": strings.Repeat("a", 64) + ".com", "long name": strings.Repeat("abc.", 64) + "com",
		"short IPv4": "127.1", "IPv4 number": "2130706433", "hexadecimal number": "0x7f000001", "hexadecimal part": "0x7f.1", "octal": "0177.0.0.1",
		"leading zero": "127.0.0.01", "hexadecimal last": "127.0.0.0x1", "five parts": "1.2.3.4.5", "too great": "256.1.1.1", "0x": "a.0x", "upper 0X": "0X7F.1",
		"number last": "example.1", "short IPv4 with dot": "127.1.",
		"bare IPv6": "::1", "open bracket": "[::1", "bracketed name": "[ok.com]", "bracketed IPv4": "[127.0.0.1]", "zone": "[fe80::1%eth0]", "escaped zone": "[fe80::1%25eth0]",
		"mapped": "[::ffff:169.254.169.254]", "mapped in hexadecimal": "[::ffff:a9fe:a9fe]", "after the bracket": "[::1]x",
	} {
		h, err := egress.ParseHost(in)
		var bad *egress.HostError
		if !errors.As(err, &bad) {
			t.Errorf("%s: %q was accepted as %q (%v)", name, in, h, err)
		} else if strings.ContainsAny(err.Error(), "\x00\n\x7f") {
			t.Errorf("%s: the error is not printable: %q", name, err)
		}
	}
}

func TestParseTarget_NormalizesAndRefuses(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"ok.com:443": "ok.com:443", "OK.com.:8443": "ok.com:8443", "[2606:4700::1111]:443": "[2606:4700::1111]:443", "ok.com": "ok.com:80"} {
		if got, err := egress.ParseTarget(in, 80); err != nil || got.String() != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"ok.com:", "ok.com:0", "ok.com:65536", "ok.com:-1", "ok.com:+443", "ok.com:0443", "ok.com:http", ":443", "::1:443", "ok.com:443:443", "ok.com:44 3"} {
		if got, err := egress.ParseTarget(in, 80); err == nil {
			t.Errorf("%q was accepted as %v", in, got)
		}
	}
	if got, err := egress.ParseTarget("ok.com", 0); err == nil {
		t.Errorf("without a port: %v", got)
	}
}

func TestAllowlist_AllowsOnlyItsEntries(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		entries   []string
		yes, no   []string
		fails     bool
		failsAt   int
		reasonHas string
	}{
		{name: "an empty list allows nothing", no: []string{"ok.com:443", "ok.com:80", "8.8.8.8:443", "localhost:80"}},
		{name: "a host", entries: []string{"OK.com."}, yes: []string{"ok.com:443", "ok.com:80", "Ok.Com.:443"},
			no: []string{"ok.com:22", "ok.com.evil:443", "evil-ok.com:443", "sub.ok.com:443", "okxcom:443", "com:443"}},
		{name: "a host and a port", entries: []string{"ok.com:8443"}, yes: []string{"ok.com:8443"}, no: []string{"ok.com:443", "ok.com:80"}},
		{name: "two ports", entries: []string{"ok.com:8443", "ok.com:22"}, yes: []string{"ok.com:8443", "ok.com:22"}, no: []string{"ok.com:443"}},
		{name: "all below a host", entries: []string{"*.ok.com"}, yes: []string{"a.ok.com:443", "b.a.ok.com:80"},
			no: []string{"ok.com:443", "aok.com:443", "a.ok.com.evil:443", "a.ok.com:8080"}},
		{name: "all below a host, one port", entries: []string{"*.ok.com:8080"}, yes: []string{"a.ok.com:8080"}, no: []string{"a.ok.com:443"}},
		{name: "an address", entries: []string{"8.8.8.8", "[2606:4700::1111]:53"}, yes: []string{"8.8.8.8:443", "[2606:4700::1111]:53", "[2606:4700:0::1111]:53"}, no: []string{"8.8.4.4:443"}},
		{name: "one that does not parse", entries: []string{"ok.com", "not a host"}, fails: true, failsAt: 1, reasonHas: "must be methods"},
		{name: "empty", entries: []string{""}, fails: true, reasonHas: "empty"},
		{name: "a URL", entries: []string{"https://ok.com"}, fails: true, reasonHas: "URL"},
		{name: "a network", entries: []string{"8.8.8.0/24"}, fails: true, reasonHas: "network"},
		{name: "a star alone", entries: []string{"*"}, fails: true, reasonHas: "star"},
		{name: "a star within", entries: []string{"a.*.com"}, fails: true, reasonHas: "star"},
		{name: "two stars", entries: []string{"*.*.com"}, fails: true, reasonHas: "'*'"},
		{name: "a top level domain", entries: []string{"*.com"}, fails: true, reasonHas: "top-level"},
		{name: "below an address", entries: []string{"*.8.8.8.8"}, fails: true, reasonHas: "address"},
		{name: "port 0", entries: []string{"ok.com:0"}, fails: true, reasonHas: "port"},
		{name: "no port", entries: []string{"ok.com:"}, fails: true, reasonHas: "port"},
		{name: "a private address", entries: []string{"10.0.0.1"}, fails: true, reasonHas: "private"},
		{name: "the metadata service", entries: []string{"169.254.169.254"}, fails: true, reasonHas: "metadata"},
		{name: "a short address", entries: []string{"127.1"}, fails: true, reasonHas: "four decimal"},
		{name: "NUL", entries: []string{"ok.com\x00evil"}, fails: true, reasonHas: `\x00`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a, err := egress.ParseAllowlist(c.entries)
			if c.fails {
				var bad *egress.EntryError
				if !errors.As(err, &bad) || bad.Index != c.failsAt || bad.Entry != c.entries[c.failsAt] || !strings.Contains(bad.Reason, c.reasonHas) {
					t.Fatalf("%#v", err)
				}
				if a.Allows(target(t, "ok.com:443")) {
					t.Error("an invalid allowlist allows its entries")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range c.yes {
				if !a.Allows(target(t, s)) {
					t.Errorf("%s is not allowed", s)
				}
			}
			for _, s := range c.no {
				if a.Allows(target(t, s)) {
					t.Errorf("%s is allowed", s)
				}
			}
		})
	}
	if _, err := egress.ParseAllowlist(make([]string, 1001)); err == nil {
		t.Error("a list that is too long was accepted")
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

func TestCheckAddress_RefusesInternalAddresses(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "172.15.255.255", "100.63.255.255", "100.128.0.1", "169.253.1.1", "2606:4700::1111", "2a00:1450:4001::200e", "64:ff9b::808:808"} {
		if err := egress.CheckAddress(netip.MustParseAddr(s)); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
	for _, s := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.1", "169.254.0.1", "169.254.169.254", "168.63.129.16",
		"172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1",
		"224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
		"::", "::1", "::8.8.8.8", "::127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::ffff:0:8.8.8.8", "64:ff9b::169.254.169.254", "64:ff9b::10.0.0.1", "64:ff9b:1::1",
		"100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "4000::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
		"2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1",
	} {
		var bad *egress.AddressError
		if err := egress.CheckAddress(netip.MustParseAddr(s)); !errors.As(err, &bad) {
			t.Errorf("%s is allowed (%v)", s, err)
		}
	}
	if egress.CheckAddress(netip.Addr{}) == nil {
		t.Error("an invalid address is allowed")
	}
}

// FuzzParseHost tests that every accepted host has one spelling, that ParseHost accepts this spelling as the same
// host, and that it contains nothing that another parser could read differently.
func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"ok.com", "ok.com.", "OK", "127.1", "0x7f.1", "[::1]", "[::ffff:1.2.3.4]", "2130706433", "ok.com\x00evil", "a..b", "*.ok.com", "1.2.3.4", "[fe80::1%25x]", "xn--a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := egress.ParseHost(s)
		if err != nil {
			return
		}
		again := h.String()
		if h.Name == "" && h.Addr.Is6() {
			again = "[" + again + "]"
		}
		h2, err := egress.ParseHost(again)
		if err != nil || h2 != h {
			t.Fatalf("%q is %q, which is %q, %v", s, h, h2, err)
		}
		if h.Name != "" {
			if _, err := netip.ParseAddr(h.Name); err == nil {
				t.Fatalf("%q is a name and an address", s)
			}
			if strings.Trim(h.Name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" || strings.HasSuffix(h.Name, ".") {
				t.Fatalf("%q is read as the name %q", s, h.Name)
			}
		}
	})
}

// FuzzParseAllowlist tests that an entry allows the host that it names and no other host.
func FuzzParseAllowlist(f *testing.F) {
	for _, s := range []string{"ok.com", "ok.com:8443", "*.ok.com", "*.ok.com:22", "8.8.8.8", "[2606:4700::1]:443", "*", "", "a:b:c", "ok.com\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := egress.ParseAllowlist([]string{s})
		for _, other := range []string{"evil.example:443", "127.0.0.1:443", "169.254.169.254:80", "[::1]:443", "localhost:80"} {
			if strings.Contains(strings.ToLower(s), strings.Split(strings.Trim(other, "["), ":")[0]) || strings.Contains(s, "*.") {
				continue
			}
			if a.Allows(target(t, other)) {
				t.Fatalf("%q allows %s", s, other)
			}
		}
		if err != nil || strings.Contains(s, "*.") {
			return
		}
		_, named, methods := strings.Cut(s, " ")
		if !methods {
			named = s
		}
		got, err := egress.ParseTarget(named, 443)
		if err != nil || !a.Allows(got) {
			t.Fatalf("%q does not allow itself: %v, %v", s, got, err)
		}
	})
}
