// Package authority is the certificate authority of an egress proxy. Its key and its own certificate never leave the proxy's data
// folder. A sandbox trusts another certificate, with the same key and subject, whose name constraints limit it to the hosts with
// methods in the sandbox's allowlist.
package authority

import (
	"container/list"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

// FileName is the name of the file that stores the certificate authority's key and certificate.
const FileName = "authority.pem"

// Validity of certificates, and limits.
const (
	authorityValidity = 10 * 365 * 24 * time.Hour // of the authority's own certificate
	authorityRenewal  = 30 * 24 * time.Hour       // remaining lifetime below which Open replaces the authority's certificate
	leafValidity      = 7 * 24 * time.Hour        // of a host's certificate
	leafRenewal       = 24 * time.Hour            // remaining lifetime below which a host's certificate is replaced
	validityBackdate  = time.Hour                 // time by which the validity of a certificate begins in the past, because clocks differ
	maxCachedLeaves   = 1024                      // limit of cached certificates of hosts
	authorityFileMode = 0o600
)

// Authority is the egress proxy's certificate authority. It issues the certificates with which the proxy terminates TLS for hosts
// whose requests it inspects. It is safe for concurrent use.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	leaf *ecdsa.PrivateKey // of all hosts' certificates; it is not stored
	now  func() time.Time

	mu     sync.Mutex
	leaves map[string]*list.Element // by host
	order  *list.List               // of *issued, the most recently used first
}

// issuedCertificate is a certificate that the authority has issued for a host, in the cache.
type issuedCertificate struct {
	host string
	cert *tls.Certificate
	ends time.Time
}

// Open reads the certificate authority that is stored in a folder. If there is none, or its certificate expires soon, Open
// creates one and returns created as true. It returns an error if the file is damaged or other users can read it: the proxy must
// not replace the key that signs for all hosts without its operator. now returns the time; nil means time.Now.
func Open(dir string, now func() time.Time) (a *Authority, created bool, err error) {
	if now == nil {
		now = time.Now
	}
	path := filepath.Join(dir, FileName)
	a, err = readAuthority(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("%s: %w; if you remove the file, the proxy creates another authority, which sandboxes trust from their next turn on", path, err)
	}
	if err != nil || now().Add(authorityRenewal).After(a.cert.NotAfter) {
		created = true
		if a, err = createAuthority(path, now()); err != nil {
			return nil, false, fmt.Errorf("create %s: %w", path, err)
		}
	}
	if a.leaf, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, false, err
	}
	a.now, a.leaves, a.order = now, map[string]*list.Element{}, list.New()
	return a, created, nil
}

// readAuthority reads an authority from a file. It returns an error if other users can read the file.
func readAuthority(path string) (*Authority, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm() != authorityFileMode {
		return nil, fmt.Errorf("it has mode %s: it must be a regular file that only its owner can read (%#o)", info.Mode(), authorityFileMode)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, rest := pem.Decode(raw)
	cert, _ := pem.Decode(rest)
	if key == nil || cert == nil {
		return nil, errors.New("it does not have a key and a certificate in PEM form")
	}
	private, err := x509.ParsePKCS8PrivateKey(key.Bytes)
	if err != nil {
		return nil, err
	}
	ec, ok := private.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("its key is a %T, not an ECDSA key", private)
	}
	parsed, err := x509.ParseCertificate(cert.Bytes)
	if err != nil {
		return nil, err
	}
	if !parsed.IsCA || !ec.PublicKey.Equal(parsed.PublicKey) {
		return nil, errors.New("its certificate is not a CA certificate of its key")
	}
	return &Authority{cert: parsed, key: ec}, nil
}

// createAuthority creates a certificate authority and writes it to a file, which it replaces.
func createAuthority(path string, now time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// Each authority has its own name: of two authorities with one name some programs try only the first.
		Subject:   pkix.Name{CommonName: "Spool egress proxy " + hex.EncodeToString(serial.Bytes()[:4])},
		NotBefore: now.Add(-validityBackdate), NotAfter: now.Add(authorityValidity),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	raw := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
	raw = append(raw, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	if err := journal.WriteFile(path, raw); err != nil {
		return nil, err
	}
	return readAuthority(path)
}

// newSerial returns a random serial number of 127 bits for a certificate. Its first byte is not 0.
func newSerial() (*big.Int, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, err
	}
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b[:]), nil
}

// Certificate returns a certificate for a host, signed by the authority. It caches the certificates of the most recently used
// hosts.
func (a *Authority) Certificate(h egress.Host) (*tls.Certificate, error) {
	now, name := a.now(), h.String()
	a.mu.Lock()
	defer a.mu.Unlock()
	if e := a.leaves[name]; e != nil {
		if m := e.Value.(*issuedCertificate); now.Add(leafRenewal).Before(m.ends) {
			a.order.MoveToFront(e)
			return m.cert, nil
		}
		a.evictCertificate(e)
	}
	m, err := a.signCertificate(h, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of %s: %w", name, err)
	}
	a.leaves[name] = a.order.PushFront(m)
	if a.order.Len() > maxCachedLeaves {
		a.evictCertificate(a.order.Back())
	}
	return m.cert, nil
}

// evictCertificate removes a certificate from the cache.
func (a *Authority) evictCertificate(e *list.Element) {
	delete(a.leaves, e.Value.(*issuedCertificate).host)
	a.order.Remove(e)
}

// signCertificate creates a certificate for a host.
func (a *Authority) signCertificate(h egress.Host, now time.Time) (*issuedCertificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	ends := now.Add(leafValidity)
	if ends.After(a.cert.NotAfter) {
		ends = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "Spool egress proxy"}, NotBefore: now.Add(-validityBackdate), NotAfter: ends,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if h.Name != "" {
		template.DNSNames = []string{h.Name}
	} else {
		template.IPAddresses = []net.IP{h.Addr.AsSlice()}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, a.leaf.Public(), a.key)
	if err != nil {
		return nil, err
	}
	return &issuedCertificate{host: h.String(), cert: &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leaf}, ends: ends}, nil
}
