package gateway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"filippo.io/age"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/gateway/internal/api"
)

// Sealer encrypts and stores the values of secrets. It is usually a *secret.Sealer.
type Sealer = api.Sealer

// recipients returns the configured public keys to which secrets are encrypted, or none if none are set.
func (c *Config) recipients() ([]age.Recipient, error) {
	text := c.SecretsRecipient
	switch {
	case c.SecretsRecipientFile != "" && text != "":
		return nil, errors.New("secrets-recipient and secrets-recipient-file: set one of them")
	case c.SecretsRecipientFile != "":
		b, err := os.ReadFile(c.SecretsRecipientFile)
		if err != nil {
			return nil, fmt.Errorf("secrets-recipient-file: %w", err)
		}
		text = string(b)
	case text == "":
		return nil, nil
	}
	return secret.ParseRecipients(text)
}

// sealer returns the Sealer of the gateway, or nil if the gateway has no key with which it can encrypt secrets.
func (g *Gateway) sealer(js jetstream.JetStream) (Sealer, error) {
	if g.deps.Sealer != nil {
		return g.deps.Sealer, nil
	}
	keys, err := g.cfg.recipients()
	if err != nil || len(keys) == 0 {
		return nil, err
	}
	return secret.NewSealer(&secretsBucket{js: js}, keys...)
}

// secretsBucket is the NATS bucket with the encrypted secrets. It opens the bucket on first use, so that a gateway
// starts while NATS is not available.
type secretsBucket struct {
	js jetstream.JetStream

	mu sync.Mutex
	kv jetstream.KeyValue
}

// open returns the opened bucket.
func (b *secretsBucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kv != nil {
		return b.kv, nil
	}
	kv, err := secret.OpenBucket(ctx, b.js)
	if err != nil {
		return nil, err
	}
	b.kv = kv
	return kv, nil
}

// Get implements secret.KV.
func (b *secretsBucket) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	kv, err := b.open(ctx)
	if err != nil {
		return nil, err
	}
	return kv.Get(ctx, key)
}

// Create implements secret.KV.
func (b *secretsBucket) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	kv, err := b.open(ctx)
	if err != nil {
		return 0, err
	}
	return kv.Create(ctx, key, value, opts...)
}

// Update implements secret.KV.
func (b *secretsBucket) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	kv, err := b.open(ctx)
	if err != nil {
		return 0, err
	}
	return kv.Update(ctx, key, value, revision)
}
