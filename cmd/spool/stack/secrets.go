package stack

import (
	"errors"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/secret"
)

// secretsFile is the name of the file in the data folder with the key that decrypts secrets.
const secretsFile = "secrets.key"

// setSecretsKeys configures the gateway and the executor to use the key pair for secrets in the data folder, unless the
// user has set keys. It creates the key pair at the first start.
func (s *Stack) setSecretsKeys() error {
	e, g := &s.cfg.Executor, &s.cfg.Gateway
	private, public := e.SecretsKey != "" || e.SecretsKeyFile != "", g.SecretsRecipient != "" || g.SecretsRecipientFile != ""
	if private || public {
		if private != public {
			return errors.New("secrets: set both the key and its recipient, or neither")
		}
		return nil
	}
	path := filepath.Join(s.cfg.DataDir, secretsFile)
	keys, err := secret.ReadKeyFile(path)
	if err != nil {
		return err
	}
	e.SecretsKeyFile = path
	g.SecretsRecipient, err = secret.PublicKey(keys)
	return err
}
