package command

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// TestCertificates_AreTrustedByCAFile tests that a server can present a certificate of spool certificates, and that
// commands trust it with --ca-file.
func TestCertificates_AreTrustedByCAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca, server, other := filepath.Join(dir, "public", "ca.pem"), filepath.Join(dir, "server"), filepath.Join(dir, "other")
	certificates := func(args ...string) string {
		t.Helper()
		w := testIO(t)
		var out, stderr bytes.Buffer
		w.Out, w.Err = &out, &stderr
		args = append([]string{"certificates", "--authority", filepath.Join(dir, "authority"), "--ca-file", ca, "--issue", server + "=localhost, 127.0.0.1,", "--issue", other + "=other:7443,[2001:db8::1]:7443,2001:db8::2"}, args...)
		if code := Run(t.Context(), args, w); code != ExitDone {
			t.Fatalf("%v ended with %d: %s", args, code, stderr.String())
		}
		return out.String()
	}
	if out := certificates("--valid-for", "1000h"); strings.Count(out, "made ") != 2 || !strings.Contains(out, server+" for localhost, 127.0.0.1, until ") || !strings.Contains(out, other+" for other, 2001:db8::1, 2001:db8::2, until ") {
		t.Errorf("it printed %s", out)
	}
	if out := certificates(); strings.Count(out, "kept ") != 2 {
		t.Errorf("a second time it printed %s", out)
	}
	out := certificates("--renew-before", "1001h", "--json")
	if strings.Count(out, `"renewed":true`) != 2 {
		t.Errorf("before their end it printed %s", out)
	}

	pair, err := certificate.OpenPair(filepath.Join(server, certificate.CertificateFile), filepath.Join(server, certificate.KeyFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	gateway := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"sessions": []any{}})
	}))
	gateway.TLS = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: pair.TLSConfig().GetCertificate}
	gateway.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	gateway.StartTLS()
	defer gateway.Close()
	url := "https://localhost" + gateway.URL[strings.LastIndex(gateway.URL, ":"):]
	for want, args := range map[string][]string{
		"": {"--ca-file", ca}, "certificate signed by unknown authority; name the file of its authority with --ca-file": nil, "ca-file: open " + dir: {"--ca-file", filepath.Join(dir, "missing")},
	} {
		w := testIO(t)
		var stderr bytes.Buffer
		w.Out, w.Err = &bytes.Buffer{}, &stderr
		code := Run(t.Context(), append([]string{"sessions", "ls", "--url", url}, args...), w)
		if (code == ExitDone) != (want == "") || !strings.Contains(stderr.String(), want) {
			t.Errorf("%v: ended with %d: %s", args, code, stderr.String())
		}
	}
}

// TestNATSCA_IsCheckedByCommands tests that with --nats-ca a command does not connect to a NATS server without TLS.
func TestNATSCA_IsCheckedByCommands(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true})
	dir := t.TempDir()
	authority, err := certificate.OpenAuthority(dir, certificate.Validity{For: time.Hour}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ca, missing := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "missing.pem")
	if err := authority.WriteTrustFile(ca); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"provision", "--wait=1ms"}, {"verify"}} {
		for file, want := range map[string]string{ca: "secure connection not available", missing: "nats-ca: open " + missing} {
			got := spool(t, testIO(t), append(command, "--nats-url", srv.ClientURL(), "--nats-ca", file)...)
			if got.code != ExitFailed || !strings.Contains(got.err, want) {
				t.Errorf("%v with %s: %+v, want %s", command, file, got, want)
			}
		}
	}
}

func TestCertificates_RefusesInvalidFlags(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"is not a folder with names": {"--issue", "folder"}, "issue: \"=nats\" is not": {"--issue", "=nats"}, "must be positive": {"--issue", "d=nats", "--valid-for=-1h"},
	} {
		w := testIO(t)
		var stderr bytes.Buffer
		w.Out, w.Err = &bytes.Buffer{}, &stderr
		dir := t.TempDir()
		code := Run(t.Context(), append([]string{"certificates", "--authority", dir, "--ca-file", filepath.Join(dir, "ca.pem")}, args...), w)
		if code != ExitUsage || !strings.Contains(stderr.String(), want) {
			t.Errorf("%v: ended with %d: %s", args, code, stderr.String())
		}
	}
}
