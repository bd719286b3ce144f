// Package auth authenticates and authorizes callers. A caller has an API key of one tenant, of which only the hash is
// stored; or the root key of the installation, which only manages keys, limits and budgets; or no key, which is
// allowed only on loopback.
package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
)

// The format of a key: the prefix, 32 random base-62 characters (190 bits), and 6 checksum characters. The checksum
// detects a mistyped key without a look-up, and lets secret scanners find leaked keys.
const (
	KeyPrefix   = "spool_sk_"
	randomLen   = 32
	checksumLen = 6
	keyLen      = len(KeyPrefix) + randomLen + checksumLen
	displayLen  = len(KeyPrefix) + 4
)

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// NewKey returns a new key with randomness from entropy.
func NewKey(entropy io.Reader) (string, error) {
	var s strings.Builder
	s.WriteString(KeyPrefix)
	for one := make([]byte, 1); s.Len() < len(KeyPrefix)+randomLen; {
		if _, err := io.ReadFull(entropy, one); err != nil {
			return "", fmt.Errorf("create a key: %w", err)
		}
		if int(one[0]) < 256/len(base62)*len(base62) { // reject other bytes, so that all characters are equally likely
			s.WriteByte(base62[int(one[0])%len(base62)])
		}
	}
	return s.String() + checksum(s.String()), nil
}

// WellFormed reports whether a string has the format and checksum of a key.
func WellFormed(key string) bool {
	return len(key) == keyLen && strings.HasPrefix(key, KeyPrefix) && checksum(key[:keyLen-checksumLen]) == key[keyLen-checksumLen:]
}

// Hash returns the stored form of a key: its SHA-256 in hex.
func Hash(key string) string {
	h := sha256.Sum256([]byte(key))
	return hex.EncodeToString(h[:])
}

// DisplayPrefix returns the first characters of a key, which lists display.
func DisplayPrefix(key string) string { return key[:min(displayLen, len(key))] }

func checksum(s string) string {
	n := crc32.ChecksumIEEE([]byte(s))
	var out [checksumLen]byte
	for i := range out {
		out[i] = base62[n%uint32(len(base62))]
		n /= uint32(len(base62))
	}
	return string(out[:])
}
