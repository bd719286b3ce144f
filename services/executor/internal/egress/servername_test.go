package egress_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
)

// recordHello returns the bytes that a client sends first.
func recordHello(t *testing.T, name string) []byte {
	t.Helper()
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close() })
	go func() {
		_ = tls.Client(there, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake() //nolint:gosec // only the first message counts
		there.Close()
	}()
	raw := make([]byte, 16<<10)
	n, err := here.Read(raw)
	if err != nil {
		t.Fatal(err)
	}
	return raw[:n]
}

// A tunnel that is not inspected is closed, before the host gets a byte, if its TLS handshake names another host than
// the one that the tunnel was opened to, or cannot be read.
func TestServerName_OfATunnelIsItsHost(t *testing.T) {
	t.Parallel()
	good := recordHello(t, "ok.example")
	for _, c := range []struct {
		name, target, denied string
		sent                 []byte
	}{
		{"the host's", "ok.example:443", "", good},
		{"in other letters", "ok.example:443", "", recordHello(t, "OK.Example")},
		{"none", "ok.example:443", "", recordHello(t, "")},
		{"no TLS", "ok.example:443", "", []byte("SSH-2.0-client\r\n")},
		{"of an address any", "93.184.216.34:8443", "", recordHello(t, "evil.example")},
		{"another", "ok.example:443", "evil.example", recordHello(t, "evil.example")},
		{"a name below", "ok.example:443", "sub.ok.example", recordHello(t, "sub.ok.example")},
		{"another, at any port", "ok.example:8443", "evil.example", recordHello(t, "evil.example")},
		{"half of a hello", "ok.example:443", "ClientHello", good[:len(good)/2]},
		{"no hello", "ok.example:443", "ClientHello", append([]byte{22}, "GET / HTTP/1.1\r\n\r\n"...)},
		{"another record than a handshake's hello", "ok.example:443", "ClientHello", append([]byte{22, 3, 1, 0, 4, 2, 0, 0, 0}, good...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			heard := make(chan []byte, 1)
			at := listen(t, func(c net.Conn) {
				raw, _ := io.ReadAll(c)
				heard <- raw
				c.Close()
			})
			change, _, p := withPublicNetwork(t, nil)
			for _, port := range []string{"443", "8443"} {
				p.at["93.184.216.34:"+port] = at
			}
			b := newWorld(t, change).box("ok.example", "ok.example:8443", "93.184.216.34:8443")
			tunnel, _ := b.tunnel(c.target)
			for i := range c.sent { // the ClientHello may arrive in any pieces
				if _, err := tunnel.Write(c.sent[i : i+1]); err != nil {
					break // the proxy has closed the tunnel
				}
			}
			_ = tunnel.(*net.UnixConn).CloseWrite()
			got := <-heard
			if c.denied == "" {
				if !bytes.Equal(got, c.sent) {
					t.Errorf("of %d bytes %d arrived", len(c.sent), len(got))
				}
				return
			}
			if len(got) > 0 {
				t.Errorf("%d bytes arrived", len(got))
			}
			if d := b.one(); d.Code != "BAD_HOST" || d.Host != "ok.example" || d.Method != "CONNECT" || !strings.Contains(d.Message, c.denied) {
				t.Errorf("%+v", d)
			}
		})
	}
}

// The server may speak first, as in SSH.
func TestServerName_IsNotWaitedForWhereTheServerBegins(t *testing.T) {
	t.Parallel()
	change, _, p := withPublicNetwork(t, nil)
	p.at["93.184.216.34:443"] = listen(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "SSH-2.0-server\r\n")
		_, _ = io.Copy(c, c)
		c.Close()
	})
	tunnel, r := newWorld(t, change).box("ok.example").tunnel("ok.example:443")
	if line, err := r.ReadString('\n'); err != nil || line != "SSH-2.0-server\r\n" {
		t.Fatalf("%q, %v", line, err)
	}
	_, _ = io.WriteString(tunnel, "SSH-2.0-client\r\n")
	if line, err := r.ReadString('\n'); err != nil || line != "SSH-2.0-client\r\n" {
		t.Errorf("%q, %v", line, err)
	}
}
