package egress_test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSmuggling_ReachesOnlyAllowedMethods tests requests with which a hostile agent tries to use other methods in a tunnel to a host for which
// only GET is allowed.
func TestSmuggling_ReachesOnlyAllowedMethods(t *testing.T) {
	t.Parallel()
	const ok = "Host: ok.example\r\n"
	for _, c := range []struct {
		name, sends string
		status      []int // of the answers, in order; the connection may end after them
		code        string
		heard       []string // the requests that the host gets
	}{
		{name: "another Host", sends: "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "another port", sends: "GET / HTTP/1.1\r\nHost: ok.example:8443\r\n\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "the port of http", sends: "GET / HTTP/1.1\r\nHost: ok.example:80\r\n\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "a Host that is none", sends: "GET / HTTP/1.1\r\nHost: ok.example\x00\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "a Host with a user", sends: "GET / HTTP/1.1\r\nHost: x@ok.example\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "two Hosts", sends: "GET / HTTP/1.1\r\nHost: ok.example\r\nHost: evil.example\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "no Host", sends: "GET / HTTP/1.1\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "no Host in HTTP/1.0", sends: "GET / HTTP/1.0\r\n\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "absolute, another host", sends: "GET https://evil.example/ HTTP/1.1\r\n" + ok + "\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "absolute, the same host", sends: "GET https://ok.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", status: []int{403}, code: "BAD_HOST"},
		{name: "an authority", sends: "CONNECT evil.example:443 HTTP/1.1\r\n" + ok + "\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "a route to a model", sends: "POST /anthropic/v1/messages HTTP/1.1\r\n" + ok + "Content-Length: 2\r\n\r\n{}", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "two slashes", sends: "GET //evil.example/ HTTP/1.1\r\n" + ok + "\r\n", status: []int{200}, heard: []string{`GET ok.example//evil.example/ [] ""`}},
		{name: "the preface of HTTP/2", sends: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "no HTTP", sends: "\x00\x01\x02\x03 hello\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "HTTP/3.7", sends: "GET / HTTP/3.7\r\n" + ok + "\r\n", status: []int{505}, code: "METHOD_NOT_ALLOWED"},
		{name: "lower case", sends: "get / HTTP/1.1\r\n" + ok + "\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "a space before the method", sends: " GET / HTTP/1.1\r\n" + ok + "\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "a method without an end", sends: strings.Repeat("G", 200<<10), status: []int{431}, code: "METHOD_NOT_ALLOWED"},
		{name: "two lengths", sends: "GET / HTTP/1.1\r\n" + ok + "Content-Length: 4\r\nContent-Length: 0\r\n\r\nPOST / HTTP/1.1\r\n" + ok + "\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "a length with a sign", sends: "GET / HTTP/1.1\r\n" + ok + "Content-Length: +4\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		{name: "an odd encoding", sends: "GET / HTTP/1.1\r\n" + ok + "Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n\r\nabcd", status: []int{501}, code: "METHOD_NOT_ALLOWED"},
		{name: "a space before the colon", sends: "GET / HTTP/1.1\r\n" + ok + "Transfer-Encoding : chunked\r\n\r\n", status: []int{400}, code: "METHOD_NOT_ALLOWED"},
		// The encoding takes precedence over the length, so the host gets one request with one length. The bytes
		// after it are checked as a request of their own.
		{name: "a length and an encoding", sends: "GET / HTTP/1.1\r\n" + ok + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nDELETE /hidden HTTP/1.1\r\n" + ok + "\r\n",
			status: []int{200}, heard: []string{`GET ok.example/ [chunked] ""`}},
		{name: "a request in a body", sends: "GET / HTTP/1.1\r\n" + ok + "Content-Length: 47\r\n\r\nDELETE /hidden HTTP/1.1\r\nHost: ok.example\r\n\r\nabGET /next HTTP/1.1\r\n" + ok + "\r\n",
			status: []int{200, 200}, heard: []string{"GET ok.example/ [] \"DELETE /hidden HTTP/1.1\\r\\nHost: ok.example\\r\\n\\r\\nab\"", `GET ok.example/next [] ""`}},
		{name: "one after the other", sends: "GET /1 HTTP/1.1\r\n" + ok + "\r\nDELETE /2 HTTP/1.1\r\n" + ok + "\r\nGET /3 HTTP/1.1\r\n" + ok + "\r\nPOST /4 HTTP/1.1\r\n" + ok + "Content-Length: 3\r\n\r\nabc",
			status: []int{200, 403, 200, 403}, code: "METHOD_NOT_ALLOWED", heard: []string{`GET ok.example/1 [] ""`, `GET ok.example/3 [] ""`}},
		{name: "nonsense after a request", sends: "GET /1 HTTP/1.1\r\n" + ok + "\r\nnonsense\r\n\r\n", status: []int{200, 400}, code: "METHOD_NOT_ALLOWED", heard: []string{`GET ok.example/1 [] ""`}},
		{name: "another method by a header", sends: "GET / HTTP/1.1\r\n" + ok + "X-HTTP-Method-Override: delete\r\n\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "the same method by a header", sends: "GET / HTTP/1.1\r\n" + ok + "X-Http-Method: get\r\n\r\n", status: []int{200}, heard: []string{`GET ok.example/ [] ""`}},
		{name: "a WebSocket", sends: "GET / HTTP/1.1\r\n" + ok + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "TLS within", sends: "GET / HTTP/1.1\r\n" + ok + "Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "an offer of two", sends: "GET / HTTP/1.1\r\n" + ok + "Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n\r\n", status: []int{403}, code: "METHOD_NOT_ALLOWED"},
		{name: "an offer of HTTP/2", sends: "GET / HTTP/1.1\r\n" + ok + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
			status: []int{200}, heard: []string{`GET ok.example/ [] ""`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSecured(t, nil)
			b := s.trusting("GET,HEAD ok.example", "GET evil.example")
			inner := b.openTunnel()
			if _, err := io.WriteString(inner, c.sends); err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(inner)
			for i, want := range c.status {
				res, err := http.ReadResponse(r, nil)
				if err != nil || res.StatusCode != want {
					t.Fatalf("answer %d: %v, %v; want %d", i, res, err, want)
				}
				_, _ = io.Copy(io.Discard, res.Body)
			}
			inner.Close()
			if got := s.heard(); !slices.Equal(got, c.heard) {
				t.Errorf("got through: %q", got)
			}
			if c.code == "" {
				return
			}
			if d := b.one(); d.Code != c.code || d.Host != "ok.example" || d.Port != 443 || d.Message == "" {
				t.Errorf("%+v", d)
			}
		})
	}
}

// Bytes that are not TLS, a handshake for another host, and a handshake for another protocol are refused before any
// request.
func TestTunnel_RefusesOtherProtocolsAndHosts(t *testing.T) {
	t.Parallel()
	s := newSecured(t, nil)
	for _, c := range []struct {
		name string
		try  func(*box) error
		code string
	}{
		{"bytes", func(b *box) error {
			c, r := b.tunnel("ok.example:443")
			_, _ = c.Write([]byte{0, 1, 2, 3})
			_, err := r.ReadByte()
			return err
		}, "METHOD_NOT_ALLOWED"},
		{"SSH", func(b *box) error {
			c, r := b.tunnel("ok.example:443")
			_, _ = io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n\r\n")
			res, err := http.ReadResponse(r, nil)
			if err == nil && res.StatusCode == 400 {
				return io.EOF
			}
			return errors.Join(err, errors.New("it is answered"))
		}, "METHOD_NOT_ALLOWED"},
		{"plain HTTP with a method that is not allowed", func(b *box) error {
			c, r := b.tunnel("ok.example:443")
			_, _ = io.WriteString(c, "PUT / HTTP/1.1\r\nHost: ok.example:443\r\nContent-Length: 0\r\n\r\n")
			res, err := http.ReadResponse(r, nil)
			if err == nil && res.StatusCode == 403 {
				return io.EOF
			}
			return errors.Join(err, errors.New("it is answered"))
		}, "METHOD_NOT_ALLOWED"},
		{"the name of another host", func(b *box) error { _, err := b.inside("ok.example:443", "evil.example"); return err }, "BAD_HOST"},
		{"HTTP/2 alone", func(b *box) error { _, err := b.inside("ok.example:443", "ok.example", "h2"); return err }, "METHOD_NOT_ALLOWED"},
		{"an old TLS", func(b *box) error {
			c, _ := b.tunnel("ok.example:443")
			return tls.Client(c, &tls.Config{RootCAs: pool(b.t, b.authority()), ServerName: "ok.example", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}).HandshakeContext(b.t.Context())
		}, "METHOD_NOT_ALLOWED"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := *s
			s.world = s.world.of(t)
			b := s.box("GET ok.example", "GET evil.example")
			if err := c.try(b); err == nil {
				t.Error("it gets through")
			}
			if d := b.one(); d.Code != c.code || d.Host != "ok.example" || d.Port != 443 || d.Message == "" {
				t.Errorf("%+v", d)
			}
		})
	}
	t.Cleanup(func() {
		if got := s.heard(); len(got) > 0 {
			t.Errorf("heard %q", got)
		}
	})
}

// A host that switches the protocol without a request for it gets no tunnel.
func TestUpgrade_WithoutARequestIsRefused(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"without a word": "", "to some other": "Connection: Upgrade\r\nUpgrade: other\r\n", "to an offer that was not passed on": "Connection: Upgrade\r\nUpgrade: h2c\r\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSecured(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Upgrade") != "" {
					t.Errorf("the host is asked for %s", r.Header.Get("Upgrade"))
				}
				c, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n"+more+"\r\n")
				_ = c.SetReadDeadline(time.Now().Add(within))
				if n, _ := c.Read(make([]byte, 1)); n > 0 {
					t.Error("the sandbox is heard without a method")
				}
				c.Close()
			})
			b := s.trusting("GET ok.example")
			c := b.openTunnel()
			_, _ = io.WriteString(c, "GET /answer HTTP/1.1\r\nHost: ok.example\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nraw")
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || res.StatusCode != http.StatusBadGateway {
				t.Errorf("%v, %v", res, err)
			}
		})
	}
}
