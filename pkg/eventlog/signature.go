package eventlog

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/spoolhq/spool/pkg/events"
)

// writableAspects maps each role that writes commits to the aspects that the role may write.
var writableAspects = map[string][]events.Aspect{
	"session":  {events.Life, events.Run, events.Key, events.Agent, events.Instance, events.Environment, events.TenantBudget, events.LimitsAspect},
	"executor": {events.Run},
	"skills":   {events.Skill},
	"janitor":  {events.Run},
}

// WriterRoles returns the roles that write commits, sorted.
func WriterRoles() []string {
	list := make([]string, 0, len(writableAspects))
	for role := range writableAspects {
		list = append(list, role)
	}
	slices.Sort(list)
	return list
}

// minKeyLength is the minimum length of a key in characters: 128 bits in hexadecimal.
const minKeyLength = 32

// Keys signs commits as one role, and checks the commits of the roles whose keys it has. The zero Keys does
// neither.
type Keys struct {
	sign  *roleKey
	check map[string]map[string]*roleKey // by role and id
	ids   []string                       // of all keys, as KeyIDs returns them
}

// roleKey is the secret of a role. id identifies it without revealing it.
type roleKey struct {
	role, id string
	// macs has the HMACs of the secret that no goroutine uses now. A new one would hash the secret again.
	macs sync.Pool
}

// newRoleKey returns the key of a role with a secret.
func newRoleKey(role, secret string) *roleKey {
	return &roleKey{role: role, id: keyID(secret), macs: sync.Pool{New: func() any { return hmac.New(sha256.New, []byte(secret)) }}}
}

// ParseKeys parses the keys of a setting: role:key, separated by commas or white space. Older keys of a role follow
// its key after plus signs: role:key+key. The first key of role, if there is one, signs.
func ParseKeys(text, role string) (Keys, error) {
	k := Keys{check: map[string]map[string]*roleKey{}}
	for entry := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || unicode.IsSpace(r) }) {
		owner, secrets, _ := strings.Cut(entry, ":")
		if writableAspects[owner] == nil {
			return Keys{}, fmt.Errorf("log-keys: an entry is not role:key with a role of %s", strings.Join(WriterRoles(), ", "))
		}
		if k.check[owner] != nil {
			return Keys{}, fmt.Errorf("log-keys: role %s appears twice: append older keys to the first one with a plus sign", owner)
		}
		k.check[owner] = map[string]*roleKey{}
		for i, secret := range strings.Split(secrets, "+") {
			if len(secret) < minKeyLength {
				return Keys{}, fmt.Errorf("log-keys: a key of %s has %d characters, at least %d are required", owner, len(secret), minKeyLength)
			}
			next := newRoleKey(owner, secret)
			k.check[owner][next.id] = next
			if k.ids = append(k.ids, owner+"/"+next.id); owner == role && i == 0 {
				k.sign = next
			}
		}
	}
	return k, nil
}

// keyID returns an identifier of a key that does not reveal the key.
func keyID(secret string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte("spool key id")) // never fails
	return hex.EncodeToString(mac.Sum(nil)[:4])
}

// IsZero reports whether k has no key.
func (k Keys) IsZero() bool { return len(k.ids) == 0 }

// KeyIDs returns the names of all keys, each as role/id.
func (k Keys) KeyIDs() []string { return slices.Clone(k.ids) }

// SigningKey returns the name of the signing key, or "" if there is none.
func (k Keys) SigningKey() string {
	if k.sign == nil {
		return ""
	}
	return k.sign.role + "/" + k.sign.id
}

// MissingRole returns the first role without a key, or "" if every role has one.
func (k Keys) MissingRole() string {
	for _, role := range WriterRoles() {
		if len(k.check[role]) == 0 {
			return role
		}
	}
	return ""
}

// Sign returns the signature of a commit, role/id/HMAC, or "" if there is no signing key.
func (k Keys) Sign(s events.Subject, c events.Commit) string {
	if k.sign == nil {
		return ""
	}
	return k.sign.role + "/" + k.sign.id + "/" + hex.EncodeToString(k.sign.computeMAC(s, c))
}

// computeMAC returns the HMAC-SHA-256 over subject, hash, state and command, each prefixed with its length. The hash
// covers the rest of the commit.
func (k *roleKey) computeMAC(s events.Subject, c events.Commit) []byte {
	mac := k.macs.Get().(hash.Hash) //nolint:forcetypeassert // newRoleKey sets the type
	defer k.macs.Put(mac)
	mac.Reset()
	b := make([]byte, 0, 256+len(c.State))
	b = appendWithLength(appendWithLength(b, s.String()), c.Hash)
	b = appendWithLength(appendWithLength(b, c.State), c.Command)
	mac.Write(b) // never fails
	return mac.Sum(b[:0])
}

// appendWithLength appends the length of part and part to b.
func appendWithLength[T string | []byte | json.RawMessage](b []byte, part T) []byte {
	return append(binary.BigEndian.AppendUint64(b, uint64(len(part))), part...)
}

// ForeignError is returned for a message in the log's streams that no writer of Spool stored. Such a message is not
// part of the log.
type ForeignError struct {
	Position Position
	Subject  string
	Reason   string
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s on %s is not part of the log: %s", e.Position, e.Subject, e.Reason)
}

// UnknownKeyError is returned for a commit that is signed with an unknown key.
type UnknownKeyError struct{ Key string }

func (e *UnknownKeyError) Error() string {
	return fmt.Sprintf("log-keys: key %s is missing", e.Key)
}

// CheckSignature returns why a commit with the given signature was not written by a writer of Spool, or "" if it was. It
// returns *UnknownKeyError if the signature names a key that k does not have; the caller must find out whether the
// key exists. Commits of a role are not checked if k has no key of that role.
func (k Keys) CheckSignature(s events.Subject, c events.Commit, signature string) (why string, err error) {
	if k.IsZero() {
		return "", nil
	}
	role, rest, _ := strings.Cut(signature, "/")
	id, mac, _ := strings.Cut(rest, "/")
	switch {
	case signature == "":
		return "the signature is missing", nil
	case !slices.Contains(writableAspects[role], s.Aspect):
		return fmt.Sprintf("%.20q does not write %s", role, s.Aspect), nil
	case len(k.check[role]) == 0:
		return "", nil
	}
	signer, ok := k.check[role][id]
	if !ok {
		return "", &UnknownKeyError{fmt.Sprintf("%s/%.8s", role, id)}
	}
	given, err := hex.DecodeString(mac)
	switch {
	case err != nil, !hmac.Equal(given, signer.computeMAC(s, c)):
		return "the signature is invalid", nil
	case c.ComputeHash(s) != c.Hash:
		return "the hash does not match the contents", nil
	case c.Command != "" && c.ID != events.DeriveID(events.KindCommit, c.Command):
		return "the id is not derived from the command", nil
	}
	return "", nil
}
