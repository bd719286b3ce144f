package egress_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// withPublicNetwork returns a change of the proxy's settings that replaces the Internet by a simulated network, in
// which ok.example and the names below it lead to a server.
func withPublicNetwork(t *testing.T, h http.HandlerFunc) (func(*egress.Config, *egress.Deps), *names, *public) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	n := &names{hosts: map[string][][]string{
		"ok.example": {{"93.184.216.34"}}, "sub.ok.example": {{"93.184.216.34"}},
		"loopback.example": {{"127.0.0.1"}}, "metadata.example": {{"169.254.169.254"}}, "mapped.example": {{"::ffff:169.254.169.254"}}, "v6.example": {{"::1"}},
		"mixed.example": {{"93.184.216.34", "10.0.0.7"}}, "nat64.example": {{"64:ff9b::a9fe:a9fe"}}, "6to4.example": {{"2002:7f00:1::"}}, "cgnat.example": {{"100.64.0.1"}},
		"multicast.example": {{"224.0.0.1"}}, "nowhere.example": {}, "machine.example": {{"93.184.215.99"}}, "zero.example": {{"0.0.0.0"}},
		"rebind.example": {{"93.184.216.34"}, {"127.0.0.1"}},
	}}
	p := &public{at: map[string]string{"93.184.216.34:80": srv.Listener.Addr().String(), "93.184.216.34:443": srv.Listener.Addr().String(), "93.184.216.34:8443": srv.Listener.Addr().String()}}
	return func(_ *egress.Config, d *egress.Deps) { d.Resolver, d.Dial = n, p.dial }, n, p
}

// TestDenied_WhatTheAllowlistDoesNotName tests requests with which a hostile agent tries to reach hosts that its allowlist does not name.
func TestDenied_WhatTheAllowlistDoesNotName(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, func(http.ResponseWriter, *http.Request) { t.Error("a request got through") })
	w := newWorld(t, change)
	list := []string{"ok.example", "*.ok.example", "93.184.216.34:8443"}
	for _, h := range []string{"loopback", "metadata", "mapped", "v6", "mixed", "nat64", "6to4", "cgnat", "multicast", "nowhere", "machine", "zero"} {
		list = append(list, h+".example")
	}
	type attempt struct {
		name, host, port string
		allow            []string
		code             string
		address          string
	}
	var tries []attempt
	for _, c := range []attempt{
		{name: "an empty allowlist", host: "ok.example", allow: []string{}, code: "NOT_ALLOWED"},
		{name: "a host that is not named", host: "evil.example", code: "NOT_ALLOWED"},
		{name: "ok.com.evil", host: "ok.example.evil", code: "NOT_ALLOWED"},
		{name: "evil-ok.com", host: "evil-ok.example", code: "NOT_ALLOWED"},
		{name: "another port", host: "ok.example", port: "22", code: "NOT_ALLOWED"},
		{name: "a model's host", host: "api.anthropic.com", code: "NOT_ALLOWED"},
		{name: "NUL", host: "ok.example\x00evil", code: "BAD_HOST"},
		{name: "space", host: "ok.example evil", code: "BAD_HOST"},
		{name: "tab", host: "ok.example\tevil", code: "BAD_HOST"},
		{name: "an escaped NUL", host: "ok.example%00evil", code: "BAD_HOST"},
		{name: "an escaped dot", host: "ok%2eexample", code: "BAD_HOST"},
		{name: "not ASCII", host: "ok.examplé", code: "BAD_HOST"},
		{name: "an ideographic full stop", host: "ok。example", code: "BAD_HOST"},
		{name: "two dots", host: "ok.example..", code: "BAD_HOST"},
		{name: "a user", host: "ok.example@evil.example", code: "BAD_HOST"},
		{name: "metadata", host: "169.254.169.254", code: "PRIVATE_ADDRESS", address: "169.254.169.254"},
		{name: "loopback", host: "127.0.0.1", code: "PRIVATE_ADDRESS", address: "127.0.0.1"},
		{name: "unspecified", host: "0.0.0.0", code: "PRIVATE_ADDRESS", address: "0.0.0.0"},
		{name: "private", host: "10.0.0.1", code: "PRIVATE_ADDRESS", address: "10.0.0.1"},
		{name: "CGNAT", host: "100.100.100.200", code: "PRIVATE_ADDRESS", address: "100.100.100.200"},
		{name: "127.1", host: "127.1", code: "BAD_HOST"},
		{name: "0x7f.1", host: "0x7f.1", code: "BAD_HOST"},
		{name: "octal", host: "0177.0.0.1", code: "BAD_HOST"},
		{name: "a number", host: "2130706433", code: "BAD_HOST"},
		{name: "a hexadecimal number", host: "0xa9fea9fe", code: "BAD_HOST"},
		{name: "IPv6 loopback", host: "[::1]", code: "PRIVATE_ADDRESS", address: "::1"},
		{name: "mapped", host: "[::ffff:169.254.169.254]", code: "BAD_HOST"},
		{name: "mapped, in hexadecimal", host: "[::ffff:a9fe:a9fe]", code: "BAD_HOST"},
		{name: "NAT64", host: "[64:ff9b::a9fe:a9fe]", code: "PRIVATE_ADDRESS", address: "64:ff9b::a9fe:a9fe"},
		{name: "a zone", host: "[fe80::1%25eth0]", code: "BAD_HOST"},
		{name: "unique local", host: "[fd00:ec2::254]", code: "PRIVATE_ADDRESS", address: "fd00:ec2::254"},
		{name: "a public address that is not named", host: "93.184.216.35", code: "NOT_ALLOWED"},
		{name: "a name for loopback", host: "loopback.example", code: "PRIVATE_ADDRESS", address: "127.0.0.1"},
		{name: "a name for metadata", host: "metadata.example", code: "PRIVATE_ADDRESS", address: "169.254.169.254"},
		{name: "a name for a mapped address", host: "mapped.example", code: "PRIVATE_ADDRESS", address: "169.254.169.254"},
		{name: "a name for IPv6 loopback", host: "v6.example", code: "PRIVATE_ADDRESS", address: "::1"},
		{name: "a name for two, one private", host: "mixed.example", code: "PRIVATE_ADDRESS", address: "10.0.0.7"},
		{name: "a name in NAT64", host: "nat64.example", code: "PRIVATE_ADDRESS", address: "64:ff9b::a9fe:a9fe"},
		{name: "a name in 6to4", host: "6to4.example", code: "PRIVATE_ADDRESS", address: "2002:7f00:1::"},
		{name: "a name in CGNAT", host: "cgnat.example", code: "PRIVATE_ADDRESS", address: "100.64.0.1"},
		{name: "a name for multicast", host: "multicast.example", code: "PRIVATE_ADDRESS", address: "224.0.0.1"},
		{name: "a name for 0.0.0.0", host: "zero.example", code: "PRIVATE_ADDRESS", address: "0.0.0.0"},
		{name: "a name for this machine", host: "machine.example", code: "PRIVATE_ADDRESS", address: "93.184.215.99"},
		{name: "a name without an address", host: "nowhere.example", code: "UNRESOLVED"},
	} {
		if c.allow == nil {
			c.allow = list
		}
		tries = append(tries, c)
	}
	for _, c := range tries {
		for _, method := range []string{"CONNECT", "GET"} {
			t.Run(c.name+" "+method, func(t *testing.T) {
				t.Parallel()
				b := w.of(t).box(c.allow...)
				port := c.port
				if port == "" {
					port = map[string]string{"CONNECT": "443", "GET": "80"}[method]
				}
				target := c.host + ":" + port
				line := "CONNECT " + target + " HTTP/1.1\r\nHost: " + "ok.example" + "\r\n\r\n"
				if method == "GET" {
					line = "GET http://" + target + "/latest/meta-data/ HTTP/1.1\r\nHost: ok.example\r\n\r\n"
				}
				res := b.raw(line)
				if res.StatusCode < 400 {
					t.Errorf("answered %s", res.Status)
				}
				d := b.denied(b.lines(0, 1)[0])
				if d.Code != c.code || d.Address != c.address || d.Method != method || d.Count != 1 || d.Message == "" {
					t.Errorf("%+v", d)
				}
				if plain, _, _ := strings.Cut(strings.Trim(c.host, "["), "\x00"); c.code != "BAD_HOST" && !strings.Contains(c.host, d.Host) || d.Host == "" {
					t.Errorf("host %q is journaled as %q", plain, d.Host)
				}
			})
		}
	}
	t.Cleanup(func() {
		if got := p.seen(); len(got) > 0 {
			t.Errorf("dialed %v", got)
		}
	})
}

func TestAllowed(t *testing.T) {
	t.Parallel()
	got := make(chan *http.Request, 1)
	change, _, p := withPublicNetwork(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- r
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = w.Write(body)
	})
	w := newWorld(t, change)
	b := w.box("*.OK.example", "ok.example", "ok.example:8443")
	for _, c := range []struct{ url, host string }{
		{"http://ok.example/a%2Fb?x=1;y=2", "ok.example"}, {"http://OK.example./", "ok.example"}, {"http://sub.ok.example:443/", "sub.ok.example:443"}, {"http://ok.example:8443/", "ok.example:8443"},
	} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPut, c.url, strings.NewReader("body"))
		req.Header.Set("Authorization", "Bearer the-sandbox's-own")
		req.Header.Set("Proxy-Authorization", "for the proxy")
		status, header, body := b.do(req)
		if status != http.StatusTeapot || header.Get("X-Answer") != "yes" || body != "body" {
			t.Fatalf("%s: %d %v %q", c.url, status, header, body)
		}
		r := <-got
		if r.Host != c.host || r.Header.Get("Authorization") != "Bearer the-sandbox's-own" || r.Header.Get("Proxy-Authorization") != "" || r.Header.Get("X-Forwarded-For") != "" {
			t.Errorf("%s: arrived for %s with %v", c.url, r.Host, r.Header)
		}
		if r.RequestURI != req.URL.RequestURI() {
			t.Errorf("%s: arrived as %s", c.url, r.RequestURI)
		}
	}
	if want := []string{"93.184.216.34:80", "93.184.216.34:80", "93.184.216.34:443", "93.184.216.34:8443"}; !slices.Equal(p.seen(), want) {
		t.Errorf("dialed %v", p.seen())
	}
}

// The proxy does not follow a redirect. The sandbox may follow it to a host of its allowlist.
func TestRedirectsAreNotFollowed(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://metadata.example/", http.StatusFound)
	})
	w := newWorld(t, change)
	b := w.box("ok.example")
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://ok.example/", nil)
	if status, header, _ := b.do(req); status != http.StatusFound || header.Get("Location") != "http://metadata.example/" {
		t.Errorf("%d %v", status, header)
	}
	if len(p.seen()) != 1 {
		t.Errorf("dialed %v", p.seen())
	}
}

func TestTunnel(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, nil)
	echo := listen(t, func(c net.Conn) {
		_, _ = io.Copy(c, c)                // until the other side closes its direction
		_, _ = io.WriteString(c, "the end") // the last bytes follow the echo
		c.Close()
	})
	p.at["93.184.216.34:443"] = echo
	w := newWorld(t, change)
	b := w.box("ok.example")
	c, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within))
	// Bytes that the client sends before the proxy's answer are not lost.
	if _, err := io.WriteString(c, "CONNECT ok.example:443 HTTP/1.1\r\nHost: ok.example:443\r\n\r\nearly "); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", res, err)
	}
	_, _ = io.WriteString(c, "late ")
	_ = c.(interface{ CloseWrite() error }).CloseWrite()
	if raw, err := io.ReadAll(r); err != nil || string(raw) != "early late the end" {
		t.Errorf("%q, %v", raw, err)
	}
	poll(t, "the connection is counted off", func() bool {
		s, err := w.client.State(t.Context(), b.id)
		return err == nil && s.OpenConnections == 0
	})
}

// A name whose address changes between the check and the dial does not reach the new address, and the next request
// for it is denied.
func TestRebinding_ToAForbiddenAddressIsDenied(t *testing.T) {
	t.Parallel()
	change, n, p := withPublicNetwork(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "public") })
	w := newWorld(t, change)
	b := w.box("rebind.example")
	get := func() (int, string) {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://rebind.example/", nil)
		status, _, body := b.do(req)
		return status, body
	}
	if status, body := get(); status != http.StatusOK || body != "public" {
		t.Errorf("%d %s", status, body)
	}
	if len(n.asked) != 1 || n.asked[0] != "rebind.example." {
		t.Errorf("looked up %v", n.asked)
	}
	if status, body := get(); status != http.StatusForbidden {
		t.Errorf("%d %s", status, body)
	}
	if !slices.Equal(p.seen(), []string{"93.184.216.34:80"}) {
		t.Errorf("dialed %v", p.seen())
	}
	if d := b.denied(b.lines(0, 1)[0]); d.Code != "PRIVATE_ADDRESS" || d.Address != "127.0.0.1" || d.Host != "rebind.example" {
		t.Errorf("%+v", d)
	}
}

func TestMethodsAndSchemes(t *testing.T) {
	t.Parallel()
	change, _, _ := withPublicNetwork(t, func(http.ResponseWriter, *http.Request) { t.Error("a request got through") })
	w := newWorld(t, change)
	for _, line := range []string{"TRACE http://ok.example/", "GET ftp://ok.example/", "GET gopher://ok.example:80/", "TRACE /anthropic/v1/messages"} {
		b := w.box("ok.example")
		res := b.raw(line + " HTTP/1.1\r\nHost: ok.example\r\n\r\n")
		if d := b.denied(b.lines(0, 1)[0]); res.StatusCode != http.StatusForbidden || d.Code != "METHOD_NOT_ALLOWED" {
			t.Errorf("%s: %s, %+v", line, res.Status, d)
		}
	}
}

func TestUpgrade_IsForwarded(t *testing.T) {
	t.Parallel()
	change, _, _ := withPublicNetwork(t, func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		line, _ := rw.ReadString('\n')
		_, _ = io.WriteString(c, "you said "+line)
	})
	w := newWorld(t, change)
	b := w.box("ok.example")
	c, err := b.dialWith(b.token)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within))
	_, _ = io.WriteString(c, "GET http://ok.example/ HTTP/1.1\r\nHost: ok.example\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", res, err)
	}
	_, _ = io.WriteString(c, "hello\n")
	if line, err := r.ReadString('\n'); err != nil || line != "you said hello\n" {
		t.Errorf("%q, %v", line, err)
	}
}

// listen serves connections on a TCP port of this machine, and returns its address.
func listen(t *testing.T, h func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			h(c)
		}
	}()
	return l.Addr().String()
}
