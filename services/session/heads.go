package session

import (
	"errors"
	"fmt"
	"os"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
)

// readHeadsKey returns the private key with which heads are signed, or the zero key if none is configured.
func (c Config) readHeadsKey() (heads.PrivateKey, error) {
	name, text := "heads-key", c.HeadsKey
	if c.HeadsKeyFile != "" {
		if text != "" {
			return heads.PrivateKey{}, errors.New("heads-key and heads-key-file: set one of them")
		}
		b, err := os.ReadFile(c.HeadsKeyFile)
		if err != nil {
			return heads.PrivateKey{}, fmt.Errorf("heads-key-file: %w", err)
		}
		name, text = "heads-key-file: "+c.HeadsKeyFile, string(b)
	} else if text == "" {
		return heads.PrivateKey{}, nil
	}
	key, err := heads.ParsePrivateKey(text)
	if err != nil {
		return heads.PrivateKey{}, fmt.Errorf("%s: %w", name, err)
	}
	return key, nil
}

// requestHeadsSigning requests that the heads of a session be signed, because an execution of the session has ended. It
// does nothing if this service does not sign heads.
func (s *Service) requestHeadsSigning(tenant, id string) {
	if s.signer != nil {
		s.signer.RequestSigning(tenant, id)
	}
}
