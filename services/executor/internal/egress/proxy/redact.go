package proxy

import (
	"bytes"
	"io"
	"strings"
)

// shortest is the length in bytes below which a credential is not looked for: it
// would be found in what has nothing to do with it.
const shortest = 8

// redactor is a reader that puts stars for a credential in what it reads: an
// endpoint may tell a key back, in an error for one. It holds back nothing but an
// end that may be the beginning of the credential.
type redactor struct {
	r      io.Reader
	secret []byte
	held   []byte
}

func redact(r io.Reader, secret string) io.Reader {
	if len(secret) < shortest {
		return r
	}
	return &redactor{r: r, secret: []byte(secret)}
}

func (x *redactor) Read(p []byte) (int, error) {
	if len(p) <= len(x.held) { // too little room to look ahead in
		buf := make([]byte, len(x.held)+len(x.secret))
		n, err := x.Read(buf)
		c := copy(p, buf[:n])
		if c < n {
			x.held = append(bytes.Clone(buf[c:n]), x.held...)
			err = nil // it comes again
		}
		return c, err
	}
	for {
		n := copy(p, x.held)
		x.held = x.held[:0]
		m, err := x.r.Read(p[n:])
		n += m
		x.mask(p[:n])
		if err != nil {
			return n, err
		}
		keep := x.overlap(p[:n])
		x.held = append(x.held, p[n-keep:n]...)
		if n > keep || len(p) == n {
			return n - keep, nil
		}
	}
}

func (x *redactor) mask(p []byte) {
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

// overlap is the length of the longest end of p that the credential begins with.
func (x *redactor) overlap(p []byte) int {
	for n := min(len(p), len(x.secret)-1); n > 0; n-- {
		if bytes.HasSuffix(p, x.secret[:n]) {
			return n
		}
	}
	return 0
}

// redactText is redact for a text.
func redactText(s, secret string) string {
	if len(secret) < shortest {
		return s
	}
	return strings.ReplaceAll(s, secret, strings.Repeat("*", len(secret)))
}
