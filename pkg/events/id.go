package events

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/truncate"
)

// IDKind is the prefix of an id. It names the kind of thing that the id identifies, for example a session.
type IDKind string

// The kinds of id. An id is Kind + "_" + 26 characters of Crockford base 32 (a ULID).
const (
	KindSession   IDKind = "ses"
	KindExecution IDKind = "exe"
	KindBlock     IDKind = "blk"
	KindEvent     IDKind = "evt"
	KindCommit    IDKind = "cmt"
	KindCommand   IDKind = "cmd"
	KindSandbox   IDKind = "sbx"
	KindJournal   IDKind = "jnl"
	KindExecutor  IDKind = "xtr"
	KindKey       IDKind = "key"
	KindApproval  IDKind = "apr"
)

// crockfordAlphabet is the alphabet in which ULIDs are written (Crockford's base 32).
const crockfordAlphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// ulidLength is the number of characters of a ULID.
const ulidLength = 26

// IDError is returned for a field whose value is not a valid id of the expected kind.
type IDError struct {
	Field string // the caller's name of the field
	Want  IDKind
	Got   string
}

func (e *IDError) Error() string {
	return fmt.Sprintf("%s: %q is not an id of the form %s_ and 26 characters of [0-9A-HJKMNP-TV-Z]", e.Field, truncate.Text(e.Got, 64), e.Want)
}

// NewID returns a new id from a time (millisecond precision) and ten bytes of entropy.
func NewID(kind IDKind, at time.Time, entropy io.Reader) (string, error) {
	var b [16]byte
	ms := uint64(at.UnixMilli())
	binary.BigEndian.PutUint64(b[:8], ms<<16)
	if _, err := io.ReadFull(entropy, b[6:]); err != nil {
		return "", fmt.Errorf("new %s id: %w", kind, err)
	}
	return string(kind) + "_" + encodeULID(b), nil
}

// DeriveID returns an id that is a hash of parts: the same parts always give the same id. A retry therefore writes the
// same ids as the first attempt.
func DeriveID(kind IDKind, parts ...string) string {
	sum := sha256.Sum256(appendParts(appendParts(make([]byte, 0, 192), string(kind)), parts...))
	var b [16]byte
	copy(b[:], sum[:])
	return string(kind) + "_" + encodeULID(b)
}

// CheckID returns an *IDError if s is not an id of the kind.
func CheckID(field string, kind IDKind, s string) error {
	rest, ok := strings.CutPrefix(s, string(kind)+"_")
	if !ok || len(rest) != ulidLength || rest[0] > '7' {
		return &IDError{Field: field, Want: kind, Got: s}
	}
	for i := range len(rest) {
		if strings.IndexByte(crockfordAlphabet, rest[i]) < 0 {
			return &IDError{Field: field, Want: kind, Got: s}
		}
	}
	return nil
}

// maxTenantLength is the maximum length of a tenant's name, which is a token of NATS subjects.
const maxTenantLength = 64

// CheckTenant returns an error if s is not a valid tenant name: 1 to 64 characters of [a-z0-9_-], the first of
// which is a letter or a digit.
func CheckTenant(field, s string) error {
	ok := len(s) > 0 && len(s) <= maxTenantLength && s[0] != '-' && s[0] != '_'
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_'
	}
	if !ok {
		return fmt.Errorf("%s: %q is not a tenant: 1 to 64 characters of a-z, 0-9, - and _", field, truncate.Text(s, 64))
	}
	return nil
}

// encodeULID encodes 128 bits as 26 characters, most significant bits first.
func encodeULID(b [16]byte) string {
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	var out [ulidLength]byte
	for i := ulidLength - 1; i >= 0; i-- {
		out[i] = crockfordAlphabet[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(out[:])
}
