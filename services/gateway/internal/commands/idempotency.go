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

// idempotencyRecord is the value that the bucket idempotency holds for a request with an Idempotency-Key: it identifies the
// request and the command, from whose id all other ids are derived.
type idempotencyRecord struct {
	Request string `json:"request"` // SHA-256 of the request, in hex
	Command string `json:"command"` // cmd_…
	// Answer is the answer to the command, once there is one. A repeat gets this answer for as long as the record
	// exists, which is longer than a session remembers its commands.
	Answer *command.Answer `json:"answer,omitempty"`
}

// recordStore stores the records of requests with an Idempotency-Key in the NATS bucket idempotency.
type recordStore struct {
	js jetstream.JetStream

	mu sync.Mutex
	kv jetstream.KeyValue
}

// openBucket opens the NATS bucket idempotency on first use, so that a gateway starts while NATS is not available.
func (i *recordStore) openBucket(ctx context.Context) (jetstream.KeyValue, error) {
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

// maxClaimTries is how many times claim tries to store a record while other gateways write or remove the same record.
const maxClaimTries = 8

// claimKey returns the record for an Idempotency-Key: fresh, which it stores, if the key is new, else the existing
// record. It returns an error if the existing record belongs to another request.
func (i *recordStore) claimKey(ctx context.Context, name string, fresh idempotencyRecord) (idempotencyRecord, error) {
	kv, err := i.openBucket(ctx)
	if err != nil {
		return idempotencyRecord{}, errKeyNotClaimed(err)
	}
	body, err := json.Marshal(fresh)
	if err != nil {
		return idempotencyRecord{}, fmt.Errorf("encode record: %w", err)
	}
	for range maxClaimTries {
		_, err = kv.Create(ctx, name, body)
		if err == nil {
			return fresh, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return idempotencyRecord{}, errKeyNotClaimed(err)
		}
		var entry jetstream.KeyValueEntry
		entry, err = kv.Get(ctx, name)
		if errors.Is(err, jetstream.ErrKeyNotFound) { // removed in the meantime, or the replica lags
			continue
		}
		if err != nil {
			return idempotencyRecord{}, errKeyNotClaimed(err)
		}
		var have idempotencyRecord
		if err := json.Unmarshal(entry.Value(), &have); err != nil {
			return idempotencyRecord{}, fmt.Errorf("decode record: %w", err)
		}
		if have.Request != fresh.Request {
			return idempotencyRecord{}, problem.New(problem.IdempotencyMismatch, "", "this Idempotency-Key was used within 24 hours for another request; a new request needs a new key")
		}
		return have, nil
	}
	return idempotencyRecord{}, errKeyNotClaimed(err)
}

// setAnswer replaces the stored record of an idempotency key by r, which holds the answer.
func (i *recordStore) setAnswer(ctx context.Context, name string, r idempotencyRecord) error {
	kv, err := i.openBucket(ctx)
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

// removeRecord removes the record of an Idempotency-Key whose request was refused, so that a corrected request may use the
// key.
func (i *recordStore) removeRecord(ctx context.Context, name string) error {
	kv, err := i.openBucket(ctx)
	if err != nil {
		return err
	}
	return kv.Delete(ctx, name)
}

// errKeyNotClaimed returns the problem for a request whose Idempotency-Key could not be stored. Its command was not
// sent.
func errKeyNotClaimed(err error) error {
	return problem.New(problem.Unavailable, "", "NATS does not answer, so the Idempotency-Key could not be stored; nothing was done, try again").WithCause(err)
}

// maxIdempotencyKey is the largest length of an Idempotency-Key, in bytes.
const maxIdempotencyKey = 255

// CheckIdempotencyKey returns INVALID_REQUEST unless key is a valid Idempotency-Key.
func CheckIdempotencyKey(key string) error {
	ok := key != "" && len(key) <= maxIdempotencyKey
	for j := 0; ok && j < len(key); j++ {
		ok = key[j] > ' ' && key[j] < 0x7f
	}
	if !ok {
		return problem.Invalid("Idempotency-Key", "the key must be 1 to %d printable ASCII characters without spaces", maxIdempotencyKey)
	}
	return nil
}

// recordName returns the name of the record of an Idempotency-Key. The key is hashed, because it may contain
// characters that are not allowed in a name. API keys that are limited to agents have separate names, so that they
// never receive the answer to a request about another agent.
func recordName(r Request, key string) string {
	parts := [][]byte{[]byte(key)}
	for _, agent := range r.Principal.Agents {
		parts = append(parts, []byte(agent))
	}
	return r.Tenant + "." + hashParts(parts...)
}

// hashParts returns the SHA-256 of parts, each prefixed with its length.
func hashParts(parts ...[]byte) string {
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
	at, ok := timeOfID(commandID)
	if !ok {
		return "", fmt.Errorf("command id %q contains no time", commandID)
	}
	seed := sha256.Sum256([]byte(string(kind) + " " + tenant + " " + commandID))
	return events.NewID(kind, at, bytes.NewReader(seed[:]))
}

// timeOfID returns the time in an id that events.NewID generated.
func timeOfID(id string) (time.Time, bool) {
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
