// Package authority is the certificate authority of one egress proxy. Its key and
// its own certificate never leave the proxy's data folder. A sandbox trusts a
// certificate of the same key and subject that name constraints limit to the hosts
// that the sandbox's allowlist has methods for.
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

// File is the name of the file with key and certificate.
const File = "authority.pem"

// Times and bounds of certificates.
const (
	lasts    = 10 * 365 * 24 * time.Hour // the authority's own
	renewAt  = 30 * 24 * time.Hour       // before its end another one is made, at a start
	leaf     = 7 * 24 * time.Hour        // a host's
	leafAt   = 24 * time.Hour            // before its end another one is made
	earlier  = time.Hour                 // clocks differ
	most     = 1024                      // hosts' certificates that are kept
	fileMode = 0o600
)

// Authority makes certificates. It is safe for concurrent use.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	leaf *ecdsa.PrivateKey // of all hosts' certificates; in memory alone
	now  func() time.Time

	mu    sync.Mutex
	kept  map[string]*list.Element
	order *list.List // of *made, the latest used first
}

// made is a host's certificate.
type made struct {
	host string
	cert *tls.Certificate
	ends time.Time
}

// Open reads the authority of a folder. Where there is none yet, or it is about to
// end, it makes one; fresh tells that. A file that is damaged, or that others may read, is an error: what
// signs for every host is not to be guessed. now is nil for time.Now.
func Open(dir string, now func() time.Time) (a *Authority, fresh bool, err error) {
	if now == nil {
		now = time.Now
	}
	path := filepath.Join(dir, File)
	a, err = read(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("%s: %w; remove it, and another one is made, which sandboxes trust from their next turn on", path, err)
	}
	if err != nil || now().Add(renewAt).After(a.cert.NotAfter) {
		fresh = true
		if a, err = create(path, now()); err != nil {
			return nil, false, fmt.Errorf("make %s: %w", path, err)
		}
	}
	if a.leaf, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, false, err
	}
	a.now, a.kept, a.order = now, map[string]*list.Element{}, list.New()
	return a, fresh, nil
}

func read(path string) (*Authority, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm() != fileMode {
		return nil, fmt.Errorf("it has mode %s: it is to be a file that its owner alone may read (%#o)", info.Mode(), fileMode)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, rest := pem.Decode(raw)
	cert, _ := pem.Decode(rest)
	if key == nil || cert == nil {
		return nil, errors.New("it does not hold a key and a certificate in PEM")
	}
	private, err := x509.ParsePKCS8PrivateKey(key.Bytes)
	if err != nil {
		return nil, err
	}
	ec, ok := private.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("its key is a %T, not one of ECDSA", private)
	}
	parsed, err := x509.ParseCertificate(cert.Bytes)
	if err != nil {
		return nil, err
	}
	if !parsed.IsCA || !ec.PublicKey.Equal(parsed.PublicKey) {
		return nil, errors.New("its certificate is no authority's, or not of its key")
	}
	return &Authority{cert: parsed, key: ec}, nil
}

// create makes another authority in place of what there is.
func create(path string, now time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := number()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// Names differ: of two authorities of one name some programs look at the first alone.
		Subject:   pkix.Name{CommonName: "Spool egress proxy " + hex.EncodeToString(serial.Bytes()[:4])},
		NotBefore: now.Add(-earlier), NotAfter: now.Add(lasts),
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
	return read(path)
}

// number is one of 127 bits, without a zero at its beginning.
func number() (*big.Int, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, err
	}
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b[:]), nil
}

// Certificate gives the certificate for a host. It is kept for the next time, with those of the hosts that were asked for last.
func (a *Authority) Certificate(h egress.Host) (*tls.Certificate, error) {
	now, name := a.now(), h.String()
	a.mu.Lock()
	defer a.mu.Unlock()
	if e := a.kept[name]; e != nil {
		if m := e.Value.(*made); now.Add(leafAt).Before(m.ends) {
			a.order.MoveToFront(e)
			return m.cert, nil
		}
		a.drop(e)
	}
	m, err := a.sign(h, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of %s: %w", name, err)
	}
	a.kept[name] = a.order.PushFront(m)
	if a.order.Len() > most {
		a.drop(a.order.Back())
	}
	return m.cert, nil
}

func (a *Authority) drop(e *list.Element) {
	delete(a.kept, e.Value.(*made).host)
	a.order.Remove(e)
}

func (a *Authority) sign(h egress.Host, now time.Time) (*made, error) {
	serial, err := number()
	if err != nil {
		return nil, err
	}
	ends := now.Add(leaf)
	if ends.After(a.cert.NotAfter) {
		ends = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "Spool egress proxy"}, NotBefore: now.Add(-earlier), NotAfter: ends,
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
	return &made{host: h.String(), cert: &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leaf}, ends: ends}, nil
}
