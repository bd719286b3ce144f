package certificate

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// The files in a folder of an authority or of a certificate.
const (
	CertificateFile = "certificate.pem" // world-readable
	KeyFile         = "key.pem"         // readable by its owner only
)

const (
	// authorityLifetime is the time for which an authority is valid.
	authorityLifetime = 10 * 365 * 24 * time.Hour
	// clockSkew is the time by which certificates are backdated, for clients whose clock is behind.
	clockSkew = time.Hour
)

// Validity is the lifetime of certificates and the time at which they are renewed.
type Validity struct {
	For         time.Duration // lifetime of a new certificate
	RenewBefore time.Duration // a certificate with less remaining lifetime is renewed
}

// Authority is the certificate authority that signs the TLS certificates of one installation.
type Authority struct {
	pair     tls.Certificate
	validity Validity
	now      time.Time
}

// OpenAuthority reads the certificate authority in folder. It creates a new one if there is none, or if the present
// authority expires before a new certificate of the given validity would. All methods use now as the present time.
func OpenAuthority(folder string, validity Validity, now time.Time) (*Authority, error) {
	if validity.For <= 0 || validity.RenewBefore < 0 {
		return nil, fmt.Errorf("certificates cannot be valid for %s and be renewed %s before their end", validity.For, validity.RenewBefore)
	}
	a := &Authority{validity: validity, now: now}
	var err error
	a.pair, err = readKeyPair(folder)
	if err == nil && a.pair.Leaf.NotAfter.After(now.Add(validity.For)) {
		return a, nil
	}
	// A crash between the two writes leaves a certificate and a key that do not match; they are replaced.
	if unreadable := (*fs.PathError)(nil); errors.As(err, &unreadable) && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("authority: %w", err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "Spool installation " + now.UTC().Format(time.DateOnly)}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, NotAfter: now.Add(max(authorityLifetime, 2*validity.For)),
	}
	if a.pair, err = a.createCertificate(folder, template); err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	return a, nil
}

// WriteTrustFile writes the authority's certificate to a file with which clients verify servers. Earlier authorities in
// the file are kept until they expire, because certificates that they signed may still be in use.
func (a *Authority) WriteTrustFile(file string) error {
	trusted := []*x509.Certificate{a.pair.Leaf}
	former, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("ca-file: %w", err)
	}
	for block, rest := pem.Decode(former); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return fmt.Errorf("ca-file: %s: %w", file, err)
		}
		if c.NotAfter.After(a.now) && !slices.ContainsFunc(trusted, c.Equal) {
			trusted = append(trusted, c)
		}
	}
	var text []byte
	for _, c := range trusted {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // clients read it
		return fmt.Errorf("ca-file: %w", err)
	}
	if err := replaceFile(file, text, 0o644, nil); err != nil {
		return fmt.Errorf("ca-file: %w", err)
	}
	return nil
}

// IssueResult describes the certificate that Authority.Issue has written or kept.
type IssueResult struct {
	NotAfter time.Time
	Renewed  bool
}

// Issue writes a certificate for the given host names and IP addresses into folder, unless the folder has one that
// this authority signed for the same names and that does not need to be renewed. The private key belongs to the owner
// of the folder.
func (a *Authority) Issue(folder string, names []string) (IssueResult, error) {
	if current, err := readKeyPair(folder); err == nil && a.canKeep(current, names) {
		return IssueResult{NotAfter: current.Leaf.NotAfter}, nil
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: names[0]}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		NotAfter: a.now.Add(a.validity.For),
	}
	template.DNSNames, template.IPAddresses = splitNames(names)
	made, err := a.createCertificate(folder, template)
	if err != nil {
		return IssueResult{}, fmt.Errorf("issue %s: %w", folder, err)
	}
	return IssueResult{NotAfter: made.Leaf.NotAfter, Renewed: true}, nil
}

// canKeep reports whether Issue can keep the current certificate: this authority signed it for the same names, and it
// is not due for renewal.
func (a *Authority) canKeep(current tls.Certificate, names []string) bool {
	dns, ips := splitNames(names)
	leaf := current.Leaf
	return leaf.CheckSignatureFrom(a.pair.Leaf) == nil && leaf.NotAfter.After(a.now.Add(a.validity.RenewBefore)) &&
		slices.Equal(leaf.DNSNames, dns) && slices.EqualFunc(leaf.IPAddresses, ips, net.IP.Equal)
}

// splitNames separates IP addresses from host names.
func splitNames(names []string) (dns []string, ips []net.IP) {
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			ips = append(ips, ip)
		} else {
			dns = append(dns, name)
		}
	}
	return dns, ips
}

// createCertificate creates a private key and a certificate for it in folder. The certificate of an authority is
// self-signed.
func (a *Authority) createCertificate(folder string, template *x509.Certificate) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return tls.Certificate{}, err
	}
	template.NotBefore = a.now.Add(-clockSkew)
	parent, signer := template, any(key)
	if !template.IsCA {
		parent, signer = a.pair.Leaf, a.pair.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return tls.Certificate{}, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return tls.Certificate{}, err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil { //nolint:gosec // the certificate is public, the key has a mode of its own
		return tls.Certificate{}, err
	}
	info, err := os.Stat(folder)
	if err != nil {
		return tls.Certificate{}, err
	}
	// A crash between the two writes leaves files that do not match, which the next call replaces.
	err = errors.Join(
		replaceFile(filepath.Join(folder, KeyFile), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600, info),
		replaceFile(filepath.Join(folder, CertificateFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644, nil))
	if err != nil {
		return tls.Certificate{}, err
	}
	return readKeyPair(folder)
}

func readKeyPair(folder string) (tls.Certificate, error) {
	return tls.LoadX509KeyPair(filepath.Join(folder, CertificateFile), filepath.Join(folder, KeyFile))
}

// replaceFile writes a file atomically. If owner is not nil, the file gets the same owner as the folder that owner
// describes.
func replaceFile(file string, text []byte, mode os.FileMode, owner os.FileInfo) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // after success it has been renamed; after a failure it is useless
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Chmod(mode))
	if owner != nil {
		if stat, ok := owner.Sys().(*syscall.Stat_t); ok && int(stat.Uid) != os.Getuid() {
			err = errors.Join(err, tmp.Chown(int(stat.Uid), int(stat.Gid)))
		}
	}
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), file)
}

// ReadCertPool returns a pool of the certificates in a PEM file.
func ReadCertPool(file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM form", file)
	}
	return pool, nil
}
