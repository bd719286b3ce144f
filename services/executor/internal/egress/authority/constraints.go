package authority

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/egress"
)

// TrustCertificate returns the certificate, in PEM, that a sandbox with the given allowlist entries must
// trust. It returns "" if no entry limits the methods, because the proxy then terminates TLS for no host.
//
// The certificate has the authority's key, subject and validity, so it verifies every host certificate of the
// authority that its critical name constraints permit. The certificates of all allowlists have the same
// subject: a program that loaded the certificate of an earlier allowlist can still verify the hosts of that
// allowlist. The certificate depends only on the authority and on the hosts, not on methods, ports, order or
// restarts, because the runner replaces an agent's process when the text of the certificate changes.
func (a *Authority) TrustCertificate(entries []string) (string, error) {
	hosts, err := inspectedHosts(entries)
	if err != nil || len(hosts) == 0 {
		return "", err
	}
	template := &x509.Certificate{
		SerialNumber: a.serialFor(hosts), RawSubject: a.cert.RawSubject,
		SubjectKeyId: a.cert.SubjectKeyId, // that host certificates name as their issuer's; another Go release may compute another one
		NotBefore:    a.cert.NotBefore, NotAfter: a.cert.NotAfter,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	addNameConstraints(template, hosts)
	// Without a source of randomness the signature is deterministic (RFC 6979).
	der, err := x509.CreateCertificate(nil, template, template, a.key.Public(), a.key)
	if err != nil {
		return "", fmt.Errorf("certificate for %d hosts: %w", len(hosts), err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), nil
}

// inspectedHosts returns the hosts of all allowlist entries that limit the methods, sorted and without
// duplicates. For an entry *.host it returns host.
func inspectedHosts(entries []string) ([]egress.Host, error) {
	var hosts []egress.Host
	for _, entry := range entries {
		r, err := egress.ParseRule(entry)
		if err != nil {
			return nil, fmt.Errorf("allowlist entry %s: %w", egress.QuotePrefix(entry), err)
		}
		if len(r.Methods) > 0 {
			hosts = append(hosts, r.Host)
		}
	}
	slices.SortFunc(hosts, func(a, b egress.Host) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(hosts), nil
}

// serialFor returns the serial number of the certificate that permits hosts. Other hosts get another number,
// because no two certificates of an issuer may share one.
func (a *Authority) serialFor(hosts []egress.Host) *big.Int {
	h := sha256.New()
	h.Write(a.cert.Raw)
	for _, host := range hosts {
		fmt.Fprintln(h, host)
	}
	b := h.Sum(nil)[:16]
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b)
}

// addNameConstraints adds critical name constraints to a certificate that permit hosts and nothing else. A
// kind of name without a permitted subtree is unlimited (RFC 5280 section 4.2.1.10), so a kind without a host
// is excluded as a whole. IPv4 and IPv6 are two kinds, because some verifiers treat them so.
func addNameConstraints(c *x509.Certificate, hosts []egress.Host) {
	c.PermittedDNSDomainsCritical = true // of all constraints
	var v4, v6 bool
	for _, h := range hosts {
		if h.Name != "" {
			c.PermittedDNSDomains = append(c.PermittedDNSDomains, h.Name)
			continue
		}
		bits := h.Addr.BitLen()
		c.PermittedIPRanges = append(c.PermittedIPRanges, &net.IPNet{IP: h.Addr.AsSlice(), Mask: net.CIDRMask(bits, bits)})
		v4, v6 = v4 || h.Addr.Is4(), v6 || h.Addr.Is6()
	}
	if c.PermittedDNSDomains == nil {
		c.ExcludedDNSDomains = []string{""} // contains every name
	}
	if !v4 {
		c.ExcludedIPRanges = append(c.ExcludedIPRanges, &net.IPNet{IP: make(net.IP, net.IPv4len), Mask: make(net.IPMask, net.IPv4len)})
	}
	if !v6 {
		c.ExcludedIPRanges = append(c.ExcludedIPRanges, &net.IPNet{IP: make(net.IP, net.IPv6len), Mask: make(net.IPMask, net.IPv6len)})
	}
}
