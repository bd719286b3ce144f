// Package heads defines signed heads: a signed record of the end of the log. The hash chain of a session has no
// key, so an attacker who can write to the stream can recompute it, cut off its end or remove a session. An entry
// of this package lists subjects with the position and hash of their last commit, links to the previous entry, and
// is signed with a key that only the session service has. The package is pure.
package heads

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// EntryVersion is the version of the format of a ChainEntry.
const EntryVersion = 1

// MaxHeads is the maximum number of heads in one entry, so that the entry fits into one NATS message.
const MaxHeads = 3000

// signatureDomain is the prefix of the bytes that a signature of an entry covers, so that the signature is not valid
// for data of another kind.
const signatureDomain = "spool signed head\x00"

// Head is the last commit of a subject, as a ChainEntry lists it.
type Head struct {
	Subject string `json:"subject"`
	Seq     uint64 `json:"seq"` // stream sequence in the shard
	Hash    string `json:"hash"`
}

// ChainEntry is one link of a shard's chain of signed heads.
type ChainEntry struct {
	V     int       `json:"v"`
	Shard int       `json:"shard"`
	N     uint64    `json:"n"`    // 1, 2, 3, …
	Prev  string    `json:"prev"` // SHA-256 of the previous entry in hex, "" for the first
	Time  time.Time `json:"time"`
	// Through is the stream sequence up to which the entries so far list the last commit of every changed subject.
	// An entry that does not increase it lists some subjects early: those of sessions whose execution ended.
	Through uint64 `json:"through"`
	Heads   []Head `json:"heads"`
}

// signedEntry is an entry as the stream HEADS stores it. The signature covers the exact bytes of Entry.
type signedEntry struct {
	Entry     json.RawMessage `json:"entry"`
	Key       string          `json:"key"`       // KeyID of the public key
	Signature string          `json:"signature"` // base64
}

// PrivateKey is the key that signs entries of the chain of signed heads.
type PrivateKey struct{ key ed25519.PrivateKey }

// PublicKey is the key that verifies the signatures of entries of the chain of signed heads.
type PublicKey struct{ key ed25519.PublicKey }

// ParsePrivateKey parses the seed of an Ed25519 key: 64 hexadecimal digits, with optional surrounding white space.
func ParsePrivateKey(text string) (PrivateKey, error) {
	seed, err := parseHex(text, ed25519.SeedSize)
	if err != nil {
		return PrivateKey{}, err
	}
	return PrivateKey{ed25519.NewKeyFromSeed(seed)}, nil
}

// ParsePublicKey parses the form that PublicKey.String returns, with optional surrounding white space.
func ParsePublicKey(text string) (PublicKey, error) {
	key, err := parseHex(text, ed25519.PublicKeySize)
	if err != nil {
		return PublicKey{}, err
	}
	return PublicKey{key}, nil
}

// parseHex decodes size bytes from hexadecimal text. Its errors do not contain the text, which may be a private key.
func parseHex(text string, size int) ([]byte, error) {
	b, err := hex.DecodeString(strings.TrimSpace(text))
	if err != nil || len(b) != size {
		return nil, fmt.Errorf("is not a key: %d hexadecimal digits are required", 2*size)
	}
	return b, nil
}

// IsZero reports whether there is no key.
func (k PrivateKey) IsZero() bool { return k.key == nil }

// Public returns the key that verifies the signatures of k.
func (k PrivateKey) Public() PublicKey {
	return PublicKey{k.key.Public().(ed25519.PublicKey)} //nolint:errcheck // of an ed25519.PrivateKey it is one
}

// String returns the key in hexadecimal digits.
func (k PublicKey) String() string { return hex.EncodeToString(k.key) }

// ID returns an identifier of the key with 16 hexadecimal digits.
func (k PublicKey) ID() string {
	sum := sha256.Sum256(k.key)
	return hex.EncodeToString(sum[:8])
}

// Sign encodes and signs an entry. stored is the message for the stream HEADS. hash is the Prev of the next entry.
func (e ChainEntry) Sign(k PrivateKey) (stored []byte, hash string, err error) {
	e.V = EntryVersion
	raw, err := encodeJSON(e)
	if err != nil {
		return nil, "", err
	}
	m := signedEntry{Entry: raw, Key: k.Public().ID(), Signature: base64.StdEncoding.EncodeToString(ed25519.Sign(k.key, signedBytes(raw)))}
	if stored, err = encodeJSON(m); err != nil {
		return nil, "", err
	}
	return stored, entryHash(raw), nil
}

// encodeJSON returns JSON without HTML escapes, so that encoding a signedEntry does not change the bytes of its
// json.RawMessage.
func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode signed heads: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// signedBytes returns the bytes that the signature of an entry covers.
func signedBytes(entry []byte) []byte { return append([]byte(signatureDomain), entry...) }

// entryHash returns the SHA-256 of an entry's bytes, in hex.
func entryHash(entry []byte) string {
	sum := sha256.Sum256(entry)
	return hex.EncodeToString(sum[:])
}

// ErrSignature is returned for an entry whose signature does not match its bytes.
var ErrSignature = errors.New("the signature does not match")

// UnknownKeyError is returned for an entry that was signed with none of the given keys.
type UnknownKeyError struct {
	KeyID string // as stated in the entry
}

func (e *UnknownKeyError) Error() string {
	return fmt.Sprintf("signed with key %.64q, which is not one of the given keys", e.KeyID)
}

// OpenEntry decodes a stored entry and verifies its signature with keys. Without keys it does not verify: the writer of
// the chain reads its own entries that way.
func OpenEntry(stored []byte, keys ...PublicKey) (e ChainEntry, hash string, err error) {
	var m signedEntry
	if err := json.Unmarshal(stored, &m); err != nil {
		return ChainEntry{}, "", fmt.Errorf("decode signed heads: %w", err)
	}
	if len(keys) > 0 {
		if err := m.verify(keys); err != nil {
			return ChainEntry{}, "", err
		}
	}
	if err := json.Unmarshal(m.Entry, &e); err != nil {
		return ChainEntry{}, "", fmt.Errorf("decode signed heads: %w", err)
	}
	if e.V != EntryVersion {
		return ChainEntry{}, "", fmt.Errorf("signed heads have version %d, newest known version is %d", e.V, EntryVersion)
	}
	return e, entryHash(m.Entry), nil
}

// verify returns ErrSignature unless one of the keys signed the entry, or *UnknownKeyError if none of the keys has the
// id that the entry states.
func (m signedEntry) verify(keys []PublicKey) error {
	for _, k := range keys {
		if k.ID() != m.Key {
			continue
		}
		signature, err := base64.StdEncoding.DecodeString(m.Signature)
		if err != nil || !ed25519.Verify(k.key, signedBytes(m.Entry), signature) {
			return ErrSignature
		}
		return nil
	}
	return &UnknownKeyError{KeyID: m.Key}
}
