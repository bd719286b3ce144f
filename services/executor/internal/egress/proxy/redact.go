package proxy

import (
	"bytes"
	"io"
	"strings"
)

// minSecretBytes is the minimum length in bytes of a credential that is redacted. A shorter one would also match unrelated text.
const minSecretBytes = 8

// redactor is a reader that replaces a credential by stars, because an upstream may repeat a key, for example in an error. It
// delays only bytes that may be the beginning of the credential.
type redactor struct {
	r      io.Reader
	secret []byte
	held   []byte
}

// newRedactor returns a reader of r that replaces the credential secret by stars.
func newRedactor(r io.Reader, secret string) io.Reader {
	if len(secret) < minSecretBytes {
		return r
	}
	return &redactor{r: r, secret: []byte(secret)}
}

func (x *redactor) Read(p []byte) (int, error) {
	if len(p) <= len(x.held) { // p is too small to look ahead
		buf := make([]byte, len(x.held)+len(x.secret))
		n, err := x.Read(buf)
		c := copy(p, buf[:n])
		if c < n {
			x.held = append(bytes.Clone(buf[c:n]), x.held...)
			err = nil // the next Read returns it
		}
		return c, err
	}
	for {
		n := copy(p, x.held)
		x.held = x.held[:0]
		m, err := x.r.Read(p[n:])
		n += m
		x.maskCredential(p[:n])
		if err != nil {
			return n, err
		}
		keep := x.credentialOverlap(p[:n])
		x.held = append(x.held, p[n-keep:n]...)
		if n > keep || len(p) == n {
			return n - keep, nil
		}
	}
}

// maskCredential replaces the credential in p by stars.
func (x *redactor) maskCredential(p []byte) {
	for {
		i := bytes.Index(p, x.secret)
		if i < 0 {
			return
		}
		for k := range x.secret {
			p[i+k] = '*'
		}
		p = p[i+len(x.secret):]
	}
}

// credentialOverlap returns the length of the longest suffix of p that is a prefix of the credential.
func (x *redactor) credentialOverlap(p []byte) int {
	for n := min(len(p), len(x.secret)-1); n > 0; n-- {
		if bytes.HasSuffix(p, x.secret[:n]) {
			return n
		}
	}
	return 0
}

// redactText replaces the credential secret in a text by stars.
func redactText(s, secret string) string {
	if len(secret) < minSecretBytes {
		return s
	}
	return strings.ReplaceAll(s, secret, strings.Repeat("*", len(secret)))
}
