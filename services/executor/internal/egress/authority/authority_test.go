package authority_test

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
)

func open(t *testing.T, dir string, now func() time.Time, fresh bool) *authority.Authority {
	t.Helper()
	a, made, err := authority.Open(dir, now)
	if err != nil || made != fresh {
		t.Fatalf("made %v, %v", made, err)
	}
	return a
}

func host(t *testing.T, s string) egress.Host {
	t.Helper()
	h, err := egress.ParseHost(s)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// verify checks a host's certificate against an authority's, as a client does, and returns it.
func verify(t *testing.T, a *authority.Authority, roots, name string, now time.Time) (*x509.Certificate, error) {
	t.Helper()
	got, err := a.Certificate(host(t, name))
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(got.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(roots)) {
		t.Fatalf("no certificate in %q", roots)
	}
	_, err = cert.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, CurrentTime: now})
	return cert, err
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := open(t, dir, nil, true)
	for _, name := range []string{"api.example.com", "a_b.example.com", "localhost", "8.8.8.8", "[2606:4700::1111]", strings.Repeat("abc.", 60) + "com"} {
		cert, err := verify(t, a, trust(t, a, "GET "+name), name, time.Now())
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if cert.IsCA || len(cert.DNSNames)+len(cert.IPAddresses) != 1 || cert.VerifyHostname("evil.example") == nil {
			t.Errorf("%s: %+v", name, cert)
		}
	}
	// After a restart the authority is the same. Clients that trust another authority do not trust this one.
	b := open(t, dir, nil, false)
	const entry = "GET ok.example"
	if trust(t, a, entry) != trust(t, b, entry) {
		t.Error("another start has another authority")
	}
	if _, err := verify(t, b, trust(t, a, entry), "ok.example", time.Now()); err != nil {
		t.Error(err)
	}
	other := open(t, t.TempDir(), nil, true)
	if _, err := verify(t, other, trust(t, a, entry), "ok.example", time.Now()); err == nil || trust(t, other, entry) == trust(t, a, entry) {
		t.Errorf("another authority's certificate is taken (%v)", err)
	}
}

func TestKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, authority.FileName)
	open(t, dir, nil, true)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	foreign := t.TempDir()
	open(t, foreign, nil, true)
	theirs, err := os.ReadFile(filepath.Join(foreign, authority.FileName))
	if err != nil {
		t.Fatal(err)
	}
	key, _ := pem.Decode(good)
	_, theirCert := pem.Decode(theirs)
	for name, raw := range map[string][]byte{
		"empty": nil, "half": good[:len(good)/2], "text": []byte("text"), "a key alone": pem.EncodeToMemory(key), "another's certificate": append(pem.EncodeToMemory(key), theirCert...),
	} {
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := authority.Open(dir, nil); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, _, err := authority.Open(dir, nil); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Errorf("a key that others may read: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	open(t, dir, nil, true)
}

// Certificates are renewed before they expire. The authority is renewed at a start.
func TestCertificates_AreRenewedInTime(t *testing.T) {
	t.Parallel()
	const entry = "GET ok.example"
	dir, now := t.TempDir(), time.Now()
	clock := func() time.Time { return now }
	a := open(t, dir, clock, true)
	first, _ := verify(t, a, trust(t, a, entry), "ok.example", now)
	now = now.Add(5 * 24 * time.Hour)
	if again, err := verify(t, a, trust(t, a, entry), "ok.example", now); err != nil || !again.Equal(first) {
		t.Errorf("after five days there is another certificate (%v)", err)
	}
	now = now.Add(36 * time.Hour)
	if again, err := verify(t, a, trust(t, a, entry), "ok.example", now); err != nil || again.Equal(first) {
		t.Errorf("shortly before its end it is the same (%v)", err)
	}
	now = now.Add(9 * 365 * 24 * time.Hour)
	b := open(t, dir, clock, false)
	if _, err := verify(t, b, trust(t, a, entry), "ok.example", now); err != nil {
		t.Errorf("in its last year: %v", err)
	}
	now = now.Add(340 * 24 * time.Hour)
	c := open(t, dir, clock, true)
	if _, err := verify(t, c, trust(t, c, entry), "ok.example", now.Add(24*time.Hour)); err != nil || trust(t, c, entry) == trust(t, a, entry) {
		t.Errorf("in its last month: %v", err)
	}
}

// The number of cached certificates is bounded: that of the host with the oldest request is dropped first.
func TestCertificates_AreBounded(t *testing.T) {
	t.Parallel()
	a := open(t, t.TempDir(), nil, true)
	cert := func(name string) string {
		c, err := a.Certificate(host(t, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(c.Certificate[0])
	}
	kept, gone := cert("kept.example"), cert("gone.example")
	for i := range 1023 {
		cert(fmt.Sprintf("h%d.example", i))
		if i%100 == 0 && cert("kept.example") != kept {
			t.Fatal("a host that is asked for again and again has another certificate")
		}
	}
	if cert("gone.example") == gone {
		t.Error("1,025 certificates are kept")
	}
	if cert("kept.example") != kept {
		t.Error("one that was used lately is not kept")
	}
}
