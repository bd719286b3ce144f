package stack

import (
	"errors"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/secret"
)

// secretsFile holds the key that opens secrets, in the data folder.
const secretsFile = "secrets.key"

// secrets gives the gateway and the executor a key pair for secrets, unless the
// user named one: it is made at the first start, and readable by its owner only.
func (s *Stack) secrets() error {
	e, g := &s.cfg.Executor, &s.cfg.Gateway
	private, public := e.SecretsKey != "" || e.SecretsKeyFile != "", g.SecretsRecipient != "" || g.SecretsRecipientFile != ""
	if private || public {
		if private != public {
			return errors.New("secrets: name both the key and its recipient, or neither")
		}
		return nil
	}
	path := filepath.Join(s.cfg.DataDir, secretsFile)
	keys, err := secret.File(path)
	if err != nil {
		return err
	}
	e.SecretsKeyFile = path
	g.SecretsRecipient, err = secret.PublicKey(keys)
	return err
}
