package commands

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// record is the value that the bucket idempotency holds for a request with an Idempotency-Key: it identifies the
// request and the command, from whose id all other ids are derived.
type record struct {
	Request string `json:"request"` // SHA-256 of the request, in hex
	Command string `json:"command"` // cmd_…
	// Answer is the answer to the command, once there is one. A repeat gets this answer for as long as the record
	// exists, which is longer than a session remembers its commands.
	Answer *command.Answer `json:"answer,omitempty"`
}

// idempotency stores the records of requests with an Idempotency-Key in the NATS bucket idempotency.
type idempotency struct {
	js jetstream.JetStream

	mu sync.Mutex
	kv jetstream.KeyValue
}

// bucket opens the bucket on first use, so that a gateway starts while NATS is not available.
func (i *idempotency) bucket(ctx context.Context) (jetstream.KeyValue, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.kv != nil {
		return i.kv, nil
	}
	kv, err := i.js.KeyValue(ctx, topology.BucketIdempotency)
	if err != nil {
		return nil, err
	}
	i.kv = kv
	return kv, nil
}

// maxClaims is how many times claim tries to store a record while other gateways write or remove the same record.
const maxClaims = 8

// claim returns the record for a key: fresh if the key is new, else the existing record. It returns an error if the
// existing record belongs to another request.
func (i *idempotency) claim(ctx context.Context, name string, fresh record) (record, error) {
	kv, err := i.bucket(ctx)
	if err != nil {
		return record{}, errNotClaimed(err)
	}
	body, err := json.Marshal(fresh)
	if err != nil {
		return record{}, fmt.Errorf("encode record: %w", err)
	}
	for range maxClaims {
		_, err = kv.Create(ctx, name, body)
		if err == nil {
			return fresh, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return record{}, errNotClaimed(err)
		}
		var entry jetstream.KeyValueEntry
		entry, err = kv.Get(ctx, name)
		if errors.Is(err, jetstream.ErrKeyNotFound) { // removed in the meantime, or the replica lags
			continue
		}
		if err != nil {
			return record{}, errNotClaimed(err)
		}
		var have record
		if err := json.Unmarshal(entry.Value(), &have); err != nil {
			return record{}, fmt.Errorf("decode record: %w", err)
		}
		if have.Request != fresh.Request {
			return record{}, problem.New(problem.IdempotencyMismatch, "", "this Idempotency-Key was used within 24 hours for another request; a new request needs a new key")
		}
		return have, nil
	}
	return record{}, errNotClaimed(err)
}

// settle replaces the stored record of an idempotency key by r, which holds the answer.
func (i *idempotency) settle(ctx context.Context, name string, r record) error {
	kv, err := i.bucket(ctx)
	if err != nil {
		return err
	}
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = kv.Put(ctx, name, body)
	return err
}

// release removes a key whose request was refused, so that a corrected request may use it.
func (i *idempotency) release(ctx context.Context, name string) error {
	kv, err := i.bucket(ctx)
	if err != nil {
		return err
	}
	return kv.Delete(ctx, name)
}

// errNotClaimed returns the problem for a request whose key could not be stored, so that nothing was done.
func errNotClaimed(err error) error {
	return problem.New(problem.Unavailable, "", "NATS does not answer, so the Idempotency-Key could not be stored; nothing was done, try again").WithCause(err)
}

// maxKey is the largest length of an Idempotency-Key, in bytes.
const maxKey = 255

// CheckKey returns INVALID_REQUEST unless key is a valid Idempotency-Key.
func CheckKey(key string) error {
	ok := key != "" && len(key) <= maxKey
	for j := 0; ok && j < len(key); j++ {
		ok = key[j] > ' ' && key[j] < 0x7f
	}
	if !ok {
		return problem.Invalid("Idempotency-Key", "the key must be 1 to %d printable ASCII characters without spaces", maxKey)
	}
	return nil
}

// keyName returns the name of a key's record. The key is hashed, because it may contain characters that are not
// allowed in a name. API keys that are limited to agents have separate names, so that they never receive the answer
// to a request about another agent.
func keyName(r Request, key string) string {
	parts := [][]byte{[]byte(key)}
	for _, agent := range r.Principal.Agents {
		parts = append(parts, []byte(agent))
	}
	return r.Tenant + "." + digest(parts...)
}

// digest returns the SHA-256 of parts, each prefixed with its length.
func digest(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:", len(p)) // a hash never fails
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// deriveID derives an id from a command's id and time. A client that retries under the command's id therefore sends the
// same ids, and ids are ordered by time.
func deriveID(kind events.IDKind, tenant, commandID string) (string, error) {
	at, ok := idTime(commandID)
	if !ok {
		return "", fmt.Errorf("command id %q contains no time", commandID)
	}
	seed := sha256.Sum256([]byte(string(kind) + " " + tenant + " " + commandID))
	return events.NewID(kind, at, bytes.NewReader(seed[:]))
}

// idTime returns the time in an id that events.NewID generated.
func idTime(id string) (time.Time, bool) {
	const alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
	_, ulid, ok := strings.Cut(id, "_")
	if !ok || len(ulid) < 10 {
		return time.Time{}, false
	}
	var ms int64
	for _, c := range ulid[:10] {
		v := strings.IndexRune(alphabet, c)
		if v < 0 {
			return time.Time{}, false
		}
		ms = ms<<5 | int64(v)
	}
	return time.UnixMilli(ms), true
}
