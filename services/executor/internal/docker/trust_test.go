package docker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pkgegress "github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
)

// fullImage has the programs that agents use.
const fullImage = "spool/sandbox:latest"

// oneHost is a resolver and dialer for a public network with one name.
type oneHost struct{ address string }

func (o oneHost) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	if host != "ok.example." {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return []netip.Addr{netip.MustParseAddr("93.184.216.34")}, nil
}

func (o oneHost) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, o.address)
}

// site starts a TLS server for ok.example, and returns the roots that verify its certificate.
func site(t *testing.T) (oneHost, *x509.CertPool) {
	t.Helper()
	ca, _, err := authority.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Certificate(pkgegress.Host{Name: "ok.example"})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "heard %s\n", r.Method) }))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	text, err := ca.TrustCertificate([]string{"GET ok.example"})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(text)) {
		t.Fatal("the site's authority has no certificate")
	}
	return oneHost{srv.Listener.Addr().String()}, roots
}

// egressHere runs a proxy in this process. sockets is the folder that sandboxes see.
func egressHere(t *testing.T) (client *api.Client, sockets string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "egr") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	net, roots := site(t)
	cfg := egress.Config{ListenSandboxes: filepath.Join(dir, "s", "egress.sock"), ListenAdmin: filepath.Join(dir, "a", "egress.sock"), Data: filepath.Join(dir, "d")}
	s, err := egress.New(cfg, egress.Deps{Resolver: net, Dial: net.dial, Roots: roots})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	client = api.NewClient(api.DialSocket(cfg.ListenAdmin))
	t.Cleanup(func() {
		client.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	poll(t, "the proxy", func() error { return client.Health(t.Context()) })
	return client, filepath.Join(dir, "s")
}

// programs is a script whose programs request a page, and are refused another method. Their certificate errors show
// which program does not trust the proxy.
const programs = `
curl -sS -w ' curl %{http_code}\n' https://ok.example/
curl -sS -o /dev/null -w 'curl post %{http_code}\n' -d x https://ok.example/
python3 -c '
import urllib.request, urllib.error
print(urllib.request.urlopen("https://ok.example/").read().decode().strip(), "python")
try: urllib.request.urlopen("https://ok.example/", data=b"x")
except urllib.error.HTTPError as e: print("python post", e.code)
'
node -e '
const http = require("http"), tls = require("tls");
http.request({host: "127.0.0.1", port: 7070, method: "CONNECT", path: "ok.example:443"}).on("connect", (res, socket) => {
  const s = tls.connect({socket, servername: "ok.example"}, () => s.write("GET / HTTP/1.1\r\nHost: ok.example\r\nConnection: close\r\n\r\n"));
  let text = "";
  s.on("data", d => text += d);
  s.on("end", () => console.log(/heard GET/.exec(text)[0], "node"));
  s.on("error", e => console.log("node:", e.message));
}).end();
'
git ls-remote https://ok.example/x
pip download --no-input --disable-pip-version-check --retries 0 --no-deps -d /tmp --index-url https://ok.example/simple nothing
`

// attached attaches to a sandbox's runner as an executor does, with epoch 1.
func attached(t *testing.T, b sandbox.Sandbox) (sandbox.Process, net.Conn) {
	t.Helper()
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"runner", "attach", "--sealed"}})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := runner.OpenSealedStream(b.Secret(), proc.Stdout(), proc.Stdin())
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewEncoder(stream).Encode(runner.Attach{Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	return proc, stream
}

// Programs in a sandbox trust the proxy's certificate for hosts whose allowlist entry has methods, and can use only
// those methods.
func TestTrust(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	client, sockets := egressHere(t)
	cfg.EgressSockets = sockets
	p := provide(t, cfg)
	if _, err := p.api.ImageInspect(t.Context(), fullImage); err != nil {
		t.Skipf("image %s is not on the engine (scripts/images makes it): %v", fullImage, err)
	}
	spec := newSpec(t)
	spec.Image, spec.EgressToken = fullImage, "token-of-the-sandbox"
	state, err := client.Register(t.Context(), spec.ID, api.Registration{Token: spec.EgressToken, Tenant: "default", Epoch: 1, Allow: []string{"GET,HEAD ok.example"}})
	if err != nil || state.Authority == "" {
		t.Fatalf("%+v, %v", state, err)
	}
	b := create(t, p, spec)
	run := func(authority string) string {
		t.Helper()
		proc, stream := attached(t, b)
		execution := newID(t, events.KindExecution)
		err := json.NewEncoder(stream).Encode(runner.Command{ID: 1, Op: runner.OpStart, Epoch: 1, Query: &runner.Query{
			SessionID: spec.Labels.Session, ExecutionID: execution, Attempt: 1, Architecture: "acp", Content: "try",
			Command: []string{"sh", "-c", "{" + programs + "} >report 2>&1"}, Authority: authority,
			Env: map[string]string{"HTTPS_PROXY": runner.EgressURL, "https_proxy": runner.EgressURL},
		}})
		for out := json.NewDecoder(stream); err == nil; {
			var m runner.Message
			if err = out.Decode(&m); err == nil && m.Line != nil && m.Line.Type == runner.TurnEnded && m.Line.ExecutionID == execution {
				break // the program is no agent, and it is over
			}
		}
		if err = errors.Join(err, proc.Kill()); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, proc.Stderr()) // it was killed
		if _, err := proc.Wait(); err != nil {
			t.Error(err)
		}
		out, _, _ := sh(t, b, `cat report; rm report`)
		return out
	}
	got := run(state.Authority)
	for _, want := range []string{"heard GET\n curl 200", "curl post 403", "heard GET python", "python post 403", "heard GET node", "fatal: https://ok.example/x/info/refs not valid", "No matching distribution found"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	if strings.Contains(strings.ToLower(got), "certificate") {
		t.Errorf("somebody does not trust:\n%s", got)
	}
	if got := run(""); strings.Contains(got, "heard") || !strings.Contains(got, "certificate") {
		t.Errorf("without the authority:\n%s", got)
	}
}
