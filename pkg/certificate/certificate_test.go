package certificate

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// folder holds an authority and one certificate for localhost in a temporary folder.
type folder struct {
	t         *testing.T
	dir       string
	cert, key string
	ca        string
}

func newFolder(t *testing.T) *folder {
	dir := t.TempDir()
	return &folder{t: t, dir: dir, cert: filepath.Join(dir, "server", CertificateFile), key: filepath.Join(dir, "server", KeyFile), ca: filepath.Join(dir, "ca.pem")}
}

// issue replaces the certificate by a new one that begins at now and is valid for the given time.
func (f *folder) issue(now time.Time, valid time.Duration) {
	f.t.Helper()
	a, err := OpenAuthority(filepath.Join(f.dir, "authority"), Validity{For: valid, RenewBefore: 1 << 60}, now)
	if err == nil {
		err = a.WriteTrustFile(f.ca)
	}
	if err == nil {
		_, err = a.Issue(filepath.Dir(f.cert), []string{"localhost", "127.0.0.1"})
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *folder) client() *tls.Config {
	f.t.Helper()
	pool, err := ReadCertPool(f.ca)
	if err != nil {
		f.t.Fatal(err)
	}
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// logText is a log that a test can read while it is written.
type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (f *folder) open() (*Pair, *logText) {
	f.t.Helper()
	log := &logText{}
	p, err := OpenPair(f.cert, f.key, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		f.t.Fatal(err)
	}
	return p, log
}

// echo runs an echo server that serves a pair until the test ends, and returns its address.
func echo(t *testing.T, p *Pair) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", p.TLSConfig())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()      //nolint:errcheck // the client closes first
				_, _ = io.Copy(c, c) // ends when the client closes the connection
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return l.Addr().String()
}

func dial(t *testing.T, addr string, cfg *tls.Config) *tls.Conn {
	t.Helper()
	c, err := tls.Dial("tcp", addr, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func serial(c *tls.Conn) string { return c.ConnectionState().PeerCertificates[0].SerialNumber.String() }

// exchange sends a byte and receives it back.
func exchange(c net.Conn) error {
	b := []byte{'x'}
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b)
	return err
}

func TestPair_ServesARenewedCertificateAndKeepsConnections(t *testing.T) {
	t.Parallel()
	f := newFolder(t)
	f.issue(time.Now(), time.Hour)
	p, log := f.open()
	addr := echo(t, p)
	before := dial(t, addr, f.client())
	first, err := p.Expiry()
	if err != nil {
		t.Fatal(err)
	}

	f.issue(time.Now(), 48*time.Hour)
	after := dial(t, addr, f.client())
	if serial(before) == serial(after) {
		t.Error("a new connection gets the former certificate")
	}
	if err := errors.Join(exchange(before), exchange(after)); err != nil {
		t.Errorf("a connection broke at the renewal: %v", err)
	}
	if second, err := p.Expiry(); err != nil || !second.After(first) {
		t.Errorf("the certificate expires at %s, %v, the former one at %s", second, err, first)
	}

	// The first case stores the key of another certificate, the second removes the key file.
	good, err := os.ReadFile(f.key)
	if err != nil {
		t.Fatal(err)
	}
	other := newFolder(t)
	other.issue(time.Now(), time.Hour)
	if err := os.Rename(other.key, f.key); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*tls.Conn{dial(t, addr, f.client()), dial(t, addr, f.client())} {
		if serial(c) != serial(after) {
			t.Error("the last valid certificate is not served any more")
		}
	}
	if _, err := p.Expiry(); err == nil || !strings.Contains(err.Error(), f.key) {
		t.Errorf("with files that do not match: %v", err)
	}
	if n := strings.Count(log.String(), "the former one stays in use"); n != 1 {
		t.Errorf("one change is logged %d times:\n%s", n, log)
	}
	if err := os.Remove(f.key); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Expiry(); err == nil || !strings.Contains(err.Error(), "tls-key: ") {
		t.Errorf("without the key file: %v", err)
	}
	if err := os.WriteFile(f.key, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Expiry(); err != nil {
		t.Errorf("after the key was restored: %v", err)
	}
}

func TestPair_ServesAnExpiredCertificate(t *testing.T) {
	t.Parallel()
	f := newFolder(t)
	f.issue(time.Now().Add(-48*time.Hour), time.Hour)
	p, log := f.open()
	if !strings.Contains(log.String(), f.cert+" expired at ") {
		t.Errorf("the log does not name the file:\n%s", log)
	}
	addr := echo(t, p)
	_, err := tls.Dial("tcp", addr, f.client())
	var invalid x509.CertificateInvalidError
	if !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
		t.Errorf("error of a client: %v", err)
	}
	f.issue(time.Now(), time.Hour)
	if err := exchange(dial(t, addr, f.client())); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), " expired at "); n != 1 {
		t.Errorf("the expiry is logged %d times:\n%s", n, log)
	}
}

func TestOpenPair_NamesTheSetting(t *testing.T) {
	t.Parallel()
	f, other := newFolder(t), newFolder(t)
	f.issue(time.Now(), time.Hour)
	other.issue(time.Now(), time.Hour)
	missing := filepath.Join(f.dir, "missing")
	for want, files := range map[string][2]string{
		"tls-cert: open " + missing: {missing, f.key}, "tls-key: open " + missing: {f.cert, missing},
		fmt.Sprintf("tls-cert: %s and %s are not a certificate and its key", f.cert, other.key): {f.cert, other.key},
		fmt.Sprintf("tls-cert: %s and %s are not a certificate and its key", f.key, f.cert):     {f.key, f.cert},
	} {
		if _, err := OpenPair(files[0], files[1], nil); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
	if _, err := CheckPair(f.cert, ""); !errors.Is(err, ErrIncompletePair) {
		t.Errorf("a certificate without a key: %v", err)
	}
}

func TestAuthority_RenewsCertificatesThatExpireSoon(t *testing.T) {
	t.Parallel()
	f := newFolder(t)
	now := time.Now()
	server := filepath.Dir(f.cert)
	issue := func(now time.Time, names ...string) IssueResult {
		t.Helper()
		a, err := OpenAuthority(filepath.Join(f.dir, "authority"), Validity{For: 100 * 24 * time.Hour, RenewBefore: 30 * 24 * time.Hour}, now)
		if err == nil {
			err = a.WriteTrustFile(f.ca)
		}
		var made IssueResult
		if err == nil {
			made, err = a.Issue(server, names)
		}
		if err != nil {
			t.Fatal(err)
		}
		pair, err := readKeyPair(server)
		if err != nil {
			t.Fatal(err)
		}
		pool, err := ReadCertPool(f.ca)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, CurrentTime: now}); err != nil {
				t.Errorf("clients refuse it for %s: %v", name, err)
			}
		}
		return made
	}
	if !issue(now, "nats", "10.0.0.1").Renewed {
		t.Error("no certificate was issued")
	}
	if issue(now.Add(69*24*time.Hour), "nats", "10.0.0.1").Renewed {
		t.Error("a certificate that is valid for 31 days was renewed")
	}
	if !issue(now.Add(71*24*time.Hour), "nats", "10.0.0.1").Renewed {
		t.Error("a certificate that is valid for 29 days was kept")
	}
	if !issue(now.Add(71*24*time.Hour), "nats").Renewed {
		t.Error("a certificate for other names was kept")
	}
	for _, file := range []string{f.key, filepath.Join(f.dir, "authority", KeyFile)} {
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("other users can read %s: %v, %v", file, info, err)
		}
	}

	// A crash between the writes of the two files leaves a certificate and a key that do not match.
	other := newFolder(t)
	other.issue(now, time.Hour)
	for _, files := range [][2]string{{other.key, f.key}, {filepath.Join(other.dir, "authority", KeyFile), filepath.Join(f.dir, "authority", KeyFile)}} {
		if err := os.Rename(files[0], files[1]); err != nil {
			t.Fatal(err)
		}
		if !issue(now.Add(72*24*time.Hour), "nats").Renewed {
			t.Errorf("%s belongs to another certificate", files[1])
		}
	}

	// After nine years and ten months the authority is replaced. Clients trust both authorities, because servers may
	// still use the former certificate.
	former, err := readKeyPair(server)
	if err != nil {
		t.Fatal(err)
	}
	issue(now.Add(72*24*time.Hour+10*365*24*time.Hour-60*24*time.Hour), "nats")
	pool, err := ReadCertPool(f.ca)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := former.Leaf.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: former.Leaf.NotBefore.Add(2 * time.Hour)}); err != nil {
		t.Errorf("the former authority is not trusted any more: %v", err)
	}
	if current, err := readKeyPair(server); err != nil || bytes.Equal(current.Leaf.AuthorityKeyId, former.Leaf.AuthorityKeyId) {
		t.Errorf("the same authority signs: %v", err)
	}
}
