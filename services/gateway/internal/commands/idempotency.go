package commands

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// record is what the bucket keeps of a request: which one it was, and the command that all ids follow from.
type record struct {
	Request string `json:"request"` // SHA-256 in hex of what was asked
	Command string `json:"command"` // cmd_…
	// Answer is what the command was answered, once it was: a repeat is given it for as long
	// as the record lives, which is longer than a session remembers its commands.
	Answer *command.Answer `json:"answer,omitempty"`
}

// idempotency keeps requests that came with an Idempotency-Key.
type idempotency struct {
	js jetstream.JetStream

	mu sync.Mutex
	kv jetstream.KeyValue
}

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

// maxClaims bounds how often a record is looked for that another gateway is about to write or remove.
const maxClaims = 8

// claim gives the command that a key stands for: fresh if the key is new, else
// the one that was sent before. Another request under the key is refused.
func (i *idempotency) claim(ctx context.Context, name string, fresh record) (record, error) {
	kv, err := i.bucket(ctx)
	if err != nil {
		return record{}, notClaimed(err)
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
			return record{}, notClaimed(err)
		}
		var entry jetstream.KeyValueEntry
		entry, err = kv.Get(ctx, name)
		if errors.Is(err, jetstream.ErrKeyNotFound) { // removed meanwhile, or a replica that lags
			continue
		}
		if err != nil {
			return record{}, notClaimed(err)
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
	return record{}, notClaimed(err)
}

// settle keeps the answer with the record.
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

// release forgets a key whose request was refused: nothing was done, so a corrected one may use it.
func (i *idempotency) release(ctx context.Context, name string) error {
	kv, err := i.bucket(ctx)
	if err != nil {
		return err
	}
	return kv.Delete(ctx, name)
}

func notClaimed(err error) error {
	return problem.New(problem.Unavailable, "", "NATS does not answer, so the Idempotency-Key could not be kept; nothing was done, try again").Because(err)
}

// maxKey bounds an Idempotency-Key, in bytes.
const maxKey = 255

// CheckKey reports an INVALID_REQUEST unless key can be an Idempotency-Key.
func CheckKey(key string) error {
	ok := key != "" && len(key) <= maxKey
	for j := 0; ok && j < len(key); j++ {
		ok = key[j] > ' ' && key[j] < 0x7f
	}
	if !ok {
		return problem.Invalid("Idempotency-Key", "it must be 1 to %d printable ASCII characters without spaces", maxKey)
	}
	return nil
}

// keyName is where the bucket keeps a request's key: hashed, since a key may hold what a name may not. API keys that are limited to
// agents have names of their own, so that none is given the answer to a request about another agent.
func keyName(r Request, key string) string {
	parts := [][]byte{[]byte(key)}
	for _, agent := range r.Principal.Agents {
		parts = append(parts, []byte(agent))
	}
	return r.Tenant + "." + digest(parts...)
}

// digest is the SHA-256 of parts, each with its length before it.
func digest(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:", len(p)) // a hash never fails
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// follow gives the id that follows from a command, with the command's time, so
// that whoever retries under the command's id sends the same ids, and ids are in order of time.
func follow(kind events.Kind, tenant, commandID string) (string, error) {
	at, ok := reads.MintedAt(commandID)
	if !ok {
		return "", fmt.Errorf("command id %q holds no time", commandID)
	}
	seed := sha256.Sum256([]byte(string(kind) + " " + tenant + " " + commandID))
	return events.NewID(kind, at, bytes.NewReader(seed[:]))
}
