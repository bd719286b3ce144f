// Package auth says who asks: API keys, of which only the hash is stored, each of
// one tenant; the root key of the installation, which manages keys, limits and budgets only;
// and, on loopback alone, nobody in particular.
package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
)

// The form of a key: the prefix, 32 random characters of base 62 (190 bits), and
// 6 characters of checksum, so that a mistyped key is known without a look-up and
// a leaked one is found by scanners.
const (
	KeyPrefix   = "spool_sk_"
	randomLen   = 32
	checksumLen = 6
	keyLen      = len(KeyPrefix) + randomLen + checksumLen
	shownLen    = len(KeyPrefix) + 4
)

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// MintKey makes a key from entropy.
func MintKey(entropy io.Reader) (string, error) {
	var s strings.Builder
	s.WriteString(KeyPrefix)
	for one := make([]byte, 1); s.Len() < len(KeyPrefix)+randomLen; {
		if _, err := io.ReadFull(entropy, one); err != nil {
			return "", fmt.Errorf("mint a key: %w", err)
		}
		if int(one[0]) < 256/len(base62)*len(base62) { // else the first characters would be likelier
			s.WriteByte(base62[int(one[0])%len(base62)])
		}
	}
	return s.String() + checksum(s.String()), nil
}

// WellFormed tells whether a string can be a key at all.
func WellFormed(key string) bool {
	return len(key) == keyLen && strings.HasPrefix(key, KeyPrefix) && checksum(key[:keyLen-checksumLen]) == key[keyLen-checksumLen:]
}

// Hash is what is stored of a key: SHA-256 in hex.
func Hash(key string) string {
	h := sha256.Sum256([]byte(key))
	return hex.EncodeToString(h[:])
}

// Shown is the beginning of a key, which a list shows.
func Shown(key string) string { return key[:min(shownLen, len(key))] }

func checksum(s string) string {
	n := crc32.ChecksumIEEE([]byte(s))
	var out [checksumLen]byte
	for i := range out {
		out[i] = base62[n%uint32(len(base62))]
		n /= uint32(len(base62))
	}
	return string(out[:])
}
