// Package secret keeps values that nobody may read but the executors: each is
// encrypted with a key of its own, which is encrypted to a public key (age). Who
// takes a value in needs the public key alone; the log and the read models know
// only where a value lies.
package secret

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"filippo.io/age"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Bounds of a value in bytes. A shorter one could not be kept out of what an
// agent prints without spoiling it.
const (
	MinValue = 4
	MaxValue = 64 << 10
)

// Errors that a caller may branch on.
var (
	// ErrNotFound is a value that is not in the bucket, or not any more.
	ErrNotFound = errors.New("the secret's value is gone")
	// ErrNoKey is a value that was sealed to none of the keys that are here.
	ErrNoKey = errors.New("the secret was sealed to another key than this service has")
	// ErrUnavailable is a bucket that does not answer; it may later.
	ErrUnavailable = errors.New("secrets cannot be read now")
	// ErrForeign is a value that lies where another one should.
	ErrForeign = errors.New("the secret is not the one that its place says")
)

// SizeError is a value that is too short or too long.
type SizeError struct{ Bytes int }

func (e *SizeError) Error() string {
	return fmt.Sprintf("a secret has %d to %d bytes, this one %d", MinValue, MaxValue, e.Bytes)
}

// KV is what is needed of the bucket topology.BucketSecrets.
type KV interface {
	Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error)
	Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error)
	Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error)
}

// sealed is what is encrypted: the place is part of it, so that a value that is
// moved to another place is found out.
type sealed struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

// Sealer takes values in.
type Sealer struct {
	kv         KV
	recipients []age.Recipient
}

// NewSealer makes a Sealer to one or more public keys, any of whose private keys opens.
func NewSealer(kv KV, recipients ...age.Recipient) (*Sealer, error) {
	if len(recipients) == 0 {
		return nil, errors.New("seal secrets: there is no public key")
	}
	return &Sealer{kv, recipients}, nil
}

// Seal stores a value for an execution, or for an environment if execution is "",
// and gives the key under which it lies. Each call makes another one.
func (s *Sealer) Seal(ctx context.Context, tenant, execution string, value []byte) (string, error) {
	if len(value) < MinValue || len(value) > MaxValue {
		return "", &SizeError{len(value)}
	}
	if err := events.CheckTenant("tenant", tenant); err != nil {
		return "", fmt.Errorf("seal a secret: %w", err)
	}
	key := tenant + ".e." + rand.Text()
	if execution != "" {
		if err := events.CheckID("executionId", events.KindExecution, execution); err != nil {
			return "", fmt.Errorf("seal a secret: %w", err)
		}
		key = tenant + ".x." + execution + "." + rand.Text()
	}
	data, err := seal(key, value, s.recipients)
	if err != nil {
		return "", err
	}
	if _, err := s.kv.Create(ctx, key, data); err != nil {
		return "", fmt.Errorf("store a secret: %w", err)
	}
	return key, nil
}

func seal(key string, value []byte, recipients []age.Recipient) ([]byte, error) {
	plain, err := json.Marshal(sealed{key, value})
	if err != nil {
		return nil, fmt.Errorf("seal a secret: %w", err)
	}
	var out bytes.Buffer
	w, err := age.Encrypt(&out, recipients...)
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("seal a secret: %w", err)
	}
	return out.Bytes(), nil
}

// Opener gives values out.
type Opener struct {
	kv         KV
	identities []age.Identity
}

// NewOpener makes an Opener with one or more private keys.
func NewOpener(kv KV, identities ...age.Identity) (*Opener, error) {
	if len(identities) == 0 {
		return nil, errors.New("open secrets: there is no private key")
	}
	return &Opener{kv, identities}, nil
}

// Open gives the value that lies under a key of the tenant.
func (o *Opener) Open(ctx context.Context, tenant, key string) (string, error) {
	if !strings.HasPrefix(key, tenant+".") {
		return "", ErrForeign
	}
	value, _, err := o.open(ctx, key)
	return string(value), err
}

func (o *Opener) open(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	entry, err := o.kv.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) || errors.Is(err, jetstream.ErrInvalidKey) {
		return nil, 0, ErrNotFound
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	r, err := age.Decrypt(bytes.NewReader(entry.Value()), o.identities...)
	var none *age.NoIdentityMatchError
	if errors.As(err, &none) {
		return nil, 0, ErrNoKey
	}
	if err != nil {
		return nil, 0, fmt.Errorf("open a secret: %w", err)
	}
	plain, err := io.ReadAll(r)
	if err != nil {
		return nil, 0, fmt.Errorf("open a secret: %w", err)
	}
	var s sealed
	if err := json.Unmarshal(plain, &s); err != nil {
		return nil, 0, errors.New("open a secret: what was sealed is not one") // err could quote it
	}
	if s.Key != key {
		return nil, 0, ErrForeign
	}
	return s.Value, entry.Revision(), nil
}

// Forgetter is what Forget needs of the bucket.
type Forgetter interface {
	ListKeysFiltered(ctx context.Context, filters ...string) (jetstream.KeyLister, error)
	Purge(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error
}

// Forget removes what was sealed for one execution, and needs no key for it.
func Forget(ctx context.Context, kv Forgetter, tenant, execution string) error {
	if err := errors.Join(events.CheckTenant("tenant", tenant), events.CheckID("executionId", events.KindExecution, execution)); err != nil {
		return fmt.Errorf("forget secrets: %w", err)
	}
	list, err := kv.ListKeysFiltered(ctx, tenant+".x."+execution+".>")
	if errors.Is(err, jetstream.ErrNoKeysFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list secrets of %s: %w", execution, err)
	}
	for key := range list.Keys() {
		if err := kv.Purge(ctx, key); err != nil {
			return errors.Join(fmt.Errorf("remove a secret: %w", err), list.Stop())
		}
	}
	return ctx.Err()
}

// Reseal encrypts a value anew, to other public keys: how keys are rotated. One
// that changed or went meanwhile is left to who did that.
func (o *Opener) Reseal(ctx context.Context, key string, recipients ...age.Recipient) error {
	value, revision, err := o.open(ctx, key)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	data, err := seal(key, value, recipients)
	if err != nil {
		return err
	}
	_, err = o.kv.Update(ctx, key, data, revision)
	var api *jetstream.APIError
	if errors.As(err, &api) && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return nil
	}
	if err != nil {
		return fmt.Errorf("store a secret: %w", err)
	}
	return nil
}

// Bucket opens topology.BucketSecrets.
func Bucket(ctx context.Context, js jetstream.JetStream) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, topology.BucketSecrets)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, fmt.Errorf("key-value bucket %s is not installed on this NATS: install Spool's streams first", topology.BucketSecrets)
	}
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", topology.BucketSecrets, err)
	}
	return kv, nil
}
