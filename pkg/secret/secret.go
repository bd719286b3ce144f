// Package secret stores values that only executors can read. Each value is encrypted with its own key, which is
// encrypted to a public key (age). A service that stores values needs only the public key; the log and the read
// models contain only the key under which a value is stored.
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

// Size limits of a value in bytes. A value shorter than MinValueSize could not be redacted from an agent's output without
// destroying other text.
const (
	MinValueSize = 4
	MaxValueSize = 64 << 10
)

// Errors that callers branch on.
var (
	// ErrNotFound is returned if the value of a secret is not, or no longer, in the bucket.
	ErrNotFound = errors.New("the secret's value does not exist")
	// ErrNoKey is returned if the value of a secret was sealed to none of the keys of this service.
	ErrNoKey = errors.New("the secret was sealed to a key that this service does not have")
	// ErrUnavailable is returned if the bucket of secrets does not respond; a retry may succeed.
	ErrUnavailable = errors.New("secrets cannot be read now")
	// ErrKeyMismatch is returned if the stored value was sealed for another storage key or tenant.
	ErrKeyMismatch = errors.New("the stored secret belongs to another key or tenant")
)

// SizeError reports that the value of a secret is too short or too long.
type SizeError struct{ Bytes int }

func (e *SizeError) Error() string {
	return fmt.Sprintf("a secret has %d to %d bytes, this one %d", MinValueSize, MaxValueSize, e.Bytes)
}

// KV is the part of the bucket topology.BucketSecrets that Sealer and Opener need.
type KV interface {
	Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error)
	Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error)
	Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error)
}

// sealedValue is the plaintext that is encrypted. It includes the storage key, so that a value that was copied to
// another key is detected.
type sealedValue struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

// Sealer encrypts the values of secrets and stores them in the bucket of secrets.
type Sealer struct {
	kv         KV
	recipients []age.Recipient
}

// NewSealer returns a Sealer that encrypts to one or more public keys. Any of the matching private keys can open the
// values.
func NewSealer(kv KV, recipients ...age.Recipient) (*Sealer, error) {
	if len(recipients) == 0 {
		return nil, errors.New("seal secrets: at least one public key is required")
	}
	return &Sealer{kv, recipients}, nil
}

// Seal encrypts and stores the value of a secret of an execution, or of an environment if execution is "", and returns
// the storage key. Each call uses a new storage key.
func (s *Sealer) Seal(ctx context.Context, tenant, execution string, value []byte) (string, error) {
	if len(value) < MinValueSize || len(value) > MaxValueSize {
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
	data, err := encryptValue(key, value, s.recipients)
	if err != nil {
		return "", err
	}
	if _, err := s.kv.Create(ctx, key, data); err != nil {
		return "", fmt.Errorf("store a secret: %w", err)
	}
	return key, nil
}

func encryptValue(key string, value []byte, recipients []age.Recipient) ([]byte, error) {
	plain, err := json.Marshal(sealedValue{key, value})
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

// Opener reads the values of secrets from the bucket of secrets and decrypts them.
type Opener struct {
	kv         KV
	identities []age.Identity
}

// NewOpener returns an Opener that decrypts with one or more private keys.
func NewOpener(kv KV, identities ...age.Identity) (*Opener, error) {
	if len(identities) == 0 {
		return nil, errors.New("open secrets: at least one private key is required")
	}
	return &Opener{kv, identities}, nil
}

// Open returns the decrypted value that is stored under a key of the tenant. It returns ErrKeyMismatch for a key of
// another tenant.
func (o *Opener) Open(ctx context.Context, tenant, key string) (string, error) {
	if !strings.HasPrefix(key, tenant+".") {
		return "", ErrKeyMismatch
	}
	value, _, err := o.readAndDecrypt(ctx, key)
	return string(value), err
}

func (o *Opener) readAndDecrypt(ctx context.Context, key string) (value []byte, revision uint64, err error) {
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
	var s sealedValue
	if err := json.Unmarshal(plain, &s); err != nil {
		return nil, 0, errors.New("open a secret: invalid plaintext") // the error of json could quote the value
	}
	if s.Key != key {
		return nil, 0, ErrKeyMismatch
	}
	return s.Value, entry.Revision(), nil
}

// RemoverKV is the part of the bucket of secrets that RemoveExecutionSecrets needs.
type RemoverKV interface {
	ListKeysFiltered(ctx context.Context, filters ...string) (jetstream.KeyLister, error)
	Purge(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error
}

// RemoveExecutionSecrets removes all values of secrets that were sealed for one execution. It needs no private key.
func RemoveExecutionSecrets(ctx context.Context, kv RemoverKV, tenant, execution string) error {
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

// Reseal encrypts a stored value again, to other public keys, for key rotation. If the value was changed or removed in
// the meantime, Reseal leaves it as it is.
func (o *Opener) Reseal(ctx context.Context, key string, recipients ...age.Recipient) error {
	value, revision, err := o.readAndDecrypt(ctx, key)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	data, err := encryptValue(key, value, recipients)
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

// OpenBucket opens the bucket in which the encrypted values of secrets are stored.
func OpenBucket(ctx context.Context, js jetstream.JetStream) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, topology.BucketSecrets)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, fmt.Errorf("key-value bucket %s is not installed on this NATS: install Spool's streams first", topology.BucketSecrets)
	}
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", topology.BucketSecrets, err)
	}
	return kv, nil
}
