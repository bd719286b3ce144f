// Package auth authenticates and authorizes callers. A caller has an API key of one tenant, of which only the hash is
// stored; or the root key of the installation, which only manages keys, limits and budgets; or no key, which is
// allowed only on loopback.
package auth

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
)

// The format of a key, a code or a session credential: the prefix, 32 random base-62 characters (190 bits), and 6 checksum characters. The checksum
// detects a mistyped key without a look-up, and lets secret scanners find leaked keys.
const (
	KeyPrefix        = "spool_sk_"
	CodePrefix       = "spool_sc_" // of codes that can be exchanged for a session credential
	SessionPrefix    = "spool_ss_" // of session credentials
	CookiePrefix     = "spool_sb_" // of values of session cookies, which are not accepted as session credentials
	keyRandomLen     = 32
	keyChecksumLen   = 6
	displayPrefixLen = len(KeyPrefix) + 4
)

// base62 is the alphabet of the random characters and the checksum of a key.
const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// NewKey returns a new API key with randomness from entropy.
func NewKey(entropy io.Reader) (string, error) { return NewToken(KeyPrefix, entropy) }

// NewToken returns a new key, code or session credential, as its prefix says, with randomness from entropy.
func NewToken(prefix string, entropy io.Reader) (string, error) {
	var s strings.Builder
	s.WriteString(prefix)
	for one := make([]byte, 1); s.Len() < len(prefix)+keyRandomLen; {
		if _, err := io.ReadFull(entropy, one); err != nil {
			return "", fmt.Errorf("create a key: %w", err)
		}
		if int(one[0]) < 256/len(base62)*len(base62) { // reject other bytes, so that all characters are equally likely
			s.WriteByte(base62[int(one[0])%len(base62)])
		}
	}
	return s.String() + keyChecksum(s.String()), nil
}

// IsWellFormedKey reports whether a string has the format and checksum of a key.
func IsWellFormedKey(key string) bool { return IsWellFormedToken(KeyPrefix, key) }

// IsWellFormedToken reports whether a string has the prefix, the format and the checksum of a token.
func IsWellFormedToken(prefix, token string) bool {
	end := len(prefix) + keyRandomLen
	return len(token) == end+keyChecksumLen && strings.HasPrefix(token, prefix) && keyChecksum(token[:end]) == token[end:]
}

// CSRFToken returns the CSRF token of a session cookie: an HMAC whose key is the value of the cookie, so that it need not
// be stored and reveals nothing about the value or its stored hash.
func CSRFToken(cookie string) string {
	h := hmac.New(sha256.New, []byte(cookie))
	h.Write([]byte("spool csrf token"))
	return hex.EncodeToString(h.Sum(nil))
}

// HashKey returns the stored form of a key: its SHA-256 in hex.
func HashKey(key string) string {
	h := sha256.Sum256([]byte(key))
	return hex.EncodeToString(h[:])
}

// DisplayPrefix returns the first characters of a key, which lists display.
func DisplayPrefix(key string) string { return key[:min(displayPrefixLen, len(key))] }

// keyChecksum returns the checksum with which a key ends, for the part s of the key before it.
func keyChecksum(s string) string {
	n := crc32.ChecksumIEEE([]byte(s))
	var out [keyChecksumLen]byte
	for i := range out {
		out[i] = base62[n%uint32(len(base62))]
		n /= uint32(len(base62))
	}
	return string(out[:])
}
