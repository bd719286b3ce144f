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

// secrets decrypts values that gateways encrypted. Its method open must be called first.
type secrets struct {
	identities []age.Identity
	opener     *secret.Opener
}

var _ references.Secrets = (*secrets)(nil)

// secrets returns the private keys of the settings, nil if there are none.
func (c Config) secrets() (*secrets, error) {
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
	return &secrets{identities: list}, nil
}

func (s *secrets) open(ctx context.Context, js jetstream.JetStream) error {
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
func (s *secrets) Open(ctx context.Context, tenant, key string) (string, error) {
	return s.opener.Open(ctx, tenant, key)
}
