package executor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"filippo.io/age"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// secretOpener decrypts secrets with the private keys in the settings. openBucket must be called before Open.
type secretOpener struct {
	identities []age.Identity
	opener     *secret.Opener
}

var _ references.Secrets = (*secretOpener)(nil)

// newSecretOpener returns a secretOpener with the private keys in the settings, or nil if there are none.
func (c Config) newSecretOpener() (*secretOpener, error) {
	text := c.SecretsKey
	switch {
	case c.SecretsKeyFile != "" && text != "":
		return nil, errors.New("secrets-key and secrets-key-file: set one of them")
	case c.SecretsKeyFile != "":
		b, err := os.ReadFile(c.SecretsKeyFile)
		if err != nil {
			return nil, fmt.Errorf("secrets-key-file: %w", err)
		}
		text = string(b)
	case text == "":
		return nil, nil
	}
	list, err := secret.ParseIdentities(text)
	if err != nil {
		return nil, err
	}
	return &secretOpener{identities: list}, nil
}

// openBucket opens the NATS bucket with the encrypted secrets. It does nothing if s is nil.
func (s *secretOpener) openBucket(ctx context.Context, js jetstream.JetStream) error {
	if s == nil {
		return nil
	}
	kv, err := secret.OpenBucket(ctx, js)
	if err == nil {
		s.opener, err = secret.NewOpener(kv, s.identities...)
	}
	return err
}

// Open implements references.Secrets.
func (s *secretOpener) Open(ctx context.Context, tenant, key string) (string, error) {
	return s.opener.Open(ctx, tenant, key)
}
