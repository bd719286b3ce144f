// Package certificate manages the TLS certificates of an installation: Pair is the certificate and key that a
// listener serves and that may be renewed while it runs; Authority signs the certificates of deploy/compose.yaml.
package certificate

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// ExpiredError reports that a certificate has expired.
type ExpiredError struct {
	File     string
	NotAfter time.Time
}

func (e *ExpiredError) Error() string {
	return fmt.Sprintf("certificate %s expired at %s: renew it", e.File, e.NotAfter.UTC().Format(time.RFC3339))
}

// Pair is a certificate and its private key in two PEM files. It reads the files again when they change, so that a
// renewal needs no restart. If the changed files cannot be used, the former certificate stays in use. It is safe for
// concurrent use.
type Pair struct {
	certFile, keyFile string
	logger            *slog.Logger

	mu      sync.Mutex
	current *tls.Certificate
	read    [2]fileVersion // versions of the files at the last read, successful or not
	failed  error          // error of the last read
	expired bool           // whether the expiry of current was logged
}

// fileVersion identifies a version of a file by its metadata, which change when the file is written or replaced.
type fileVersion struct {
	info os.FileInfo
}

// equal reports whether v and w are the same version of a file, as far as the metadata shows.
func (v fileVersion) equal(w fileVersion) bool {
	if v.info == nil || w.info == nil {
		return v.info == nil && w.info == nil
	}
	return os.SameFile(v.info, w.info) && v.info.ModTime().Equal(w.info.ModTime()) && v.info.Size() == w.info.Size()
}

// OpenPair reads a certificate and its private key. Its errors begin with tls-cert or tls-key, the setting that names
// the faulty file. An expired certificate is not an error: it is logged and served, so that clients report it. A nil
// logger discards log messages.
func OpenPair(certFile, keyFile string, logger *slog.Logger) (*Pair, error) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	p := &Pair{certFile: certFile, keyFile: keyFile, logger: logger}
	p.read = p.fileVersions()
	current, err := p.loadFiles()
	if err != nil {
		return nil, err
	}
	p.current = current
	p.warnIfExpired()
	return p, nil
}

// TLSConfig returns the configuration of a listener that serves the certificate with TLS 1.2 or later.
func (p *Pair) TLSConfig() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return p.refresh(), nil
	}}
}

// Expiry returns when the served certificate expires, and an error while changed certificate files cannot be used.
func (p *Pair) Expiry() (time.Time, error) {
	current := p.refresh()
	p.mu.Lock()
	defer p.mu.Unlock()
	return current.Leaf.NotAfter, p.failed
}

// refresh reads the certificate files again if they have changed, and returns the certificate to serve.
func (p *Pair) refresh() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	versions := p.fileVersions()
	if !versions[0].equal(p.read[0]) || !versions[1].equal(p.read[1]) {
		p.read = versions
		next, err := p.loadFiles()
		if p.failed = err; err != nil {
			p.logger.Error("read changed certificate: the former one stays in use", "error", err, "expires", p.current.Leaf.NotAfter)
		} else {
			p.current, p.expired = next, false
			p.logger.Info("certificate reloaded", "file", p.certFile, "expires", next.Leaf.NotAfter)
		}
	}
	p.warnIfExpired()
	return p.current
}

// warnIfExpired logs, once for each certificate, that the served certificate has expired.
func (p *Pair) warnIfExpired() {
	if p.expired || time.Now().Before(p.current.Leaf.NotAfter) {
		return
	}
	p.expired = true
	p.logger.Error("certificate expired: clients will refuse it", "error", &ExpiredError{p.certFile, p.current.Leaf.NotAfter})
}

func (p *Pair) fileVersions() (v [2]fileVersion) {
	for i, file := range []string{p.certFile, p.keyFile} {
		// An error of os.Stat is not handled here: loadFiles returns the same error when it reads the file.
		if info, err := os.Stat(file); err == nil {
			v[i].info = info
		}
	}
	return v
}

func (p *Pair) loadFiles() (*tls.Certificate, error) {
	cert, err := os.ReadFile(p.certFile)
	if err != nil {
		return nil, fmt.Errorf("tls-cert: %w", err)
	}
	key, err := os.ReadFile(p.keyFile)
	if err != nil {
		return nil, fmt.Errorf("tls-key: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("tls-cert: %s and %s are not a certificate and its key: %w", p.certFile, p.keyFile, err)
	}
	return &pair, nil
}

// ErrIncompletePair is returned by CheckPair when only one of the certificate file and the key file is named.
var ErrIncompletePair = errors.New("a certificate needs both files: set --tls-cert and --tls-key")

// CheckPair reports whether both the certificate file and the key file are named. It returns ErrIncompletePair if only
// one of them is.
func CheckPair(certFile, keyFile string) (named bool, err error) {
	if (certFile == "") != (keyFile == "") {
		return false, ErrIncompletePair
	}
	return certFile != "", nil
}
