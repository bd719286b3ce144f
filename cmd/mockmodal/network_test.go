package main_test

import (
	"net"
	"testing"

	modal "github.com/modal-labs/modal-client/go"
)

// greet listens on an address and writes a line to each connection.
func greet(t *testing.T, address string) (port string) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("hello\n"))
			_ = conn.Close()
		}
	}()
	_, port, err = net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// dial returns a script that prints the text that a listener sends, or "refused".
func dial(host, port string) string {
	return "timeout 20 bash -c 'cat < /dev/tcp/" + host + "/" + port + "' 2>/dev/null || echo refused"
}

func TestNetwork_BlockedSandboxReachesNothing(t *testing.T) {
	b := newBed(t)
	port := greet(t, b.Gateway+":0")
	b.expect(b.create(nil), dial(b.Gateway, port), "refused")
}

func TestNetwork_AllowlistIsEnforced(t *testing.T) {
	b := newBed(t)
	port := greet(t, b.Gateway+":0")
	peer := b.create(&modal.SandboxCreateParams{})
	out, _, _ := b.run(peer, "hostname -I", "")
	b.expect(peer, dial(b.Gateway, port), "hello")
	serving, err := peer.Exec(b.ctx, []string{"perl", "-MIO::Socket::INET", "-e",
		`my $s = IO::Socket::INET->new(Listen => 5, LocalPort => 8000, ReuseAddr => 1) or die $!; $| = 1; print "ready\n"; while (my $c = $s->accept) { print $c "peer\n"; close $c }`}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := serving.Stdout.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	address := firstField(out)
	b.expect(b.create(&modal.SandboxCreateParams{}), dial(address, "8000"), "peer")

	only := b.create(&modal.SandboxCreateParams{OutboundCIDRAllowlist: &modal.Allowlist{Entries: []string{b.Gateway + "/32"}}})
	b.expect(only, dial(b.Gateway, port), "hello")
	b.expect(only, dial(address, "8000"), "refused")
	if err := only.UpdateNetworkPolicy(b.ctx, &modal.SandboxUpdateNetworkPolicyParams{
		OutboundCIDRAllowlist: &modal.Allowlist{Entries: []string{address + "/32"}}, OutboundDomainAllowlist: &modal.Allowlist{},
	}); err != nil {
		t.Fatal(err)
	}
	b.expect(only, dial(b.Gateway, port), "refused")
	b.expect(only, dial(address, "8000"), "peer")
	b.noViolations()
}

func TestNetwork_DomainAllowsPort443Alone(t *testing.T) {
	b := newBed(t, "--gateway-name", "proxy.test")
	greet(t, b.Gateway+":443")
	other := greet(t, b.Gateway+":0")
	sb := b.create(&modal.SandboxCreateParams{OutboundDomainAllowlist: &modal.Allowlist{Entries: []string{"proxy.test"}}})
	b.expect(sb, dial("proxy.test", "443"), "hello")
	b.expect(sb, dial("proxy.test", other), "refused")
}

func firstField(text string) string {
	for n, c := range text {
		if c == ' ' || c == '\n' {
			return text[:n]
		}
	}
	return text
}
