package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"filippo.io/age"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/secret"
)

type secretsCommand struct {
	Keygen secretsKeygenCommand `cmd:"" help:"Create a key pair for secrets: executors need the private key, gateways the public key."`
	Rotate secretsRotateCommand `cmd:"" help:"Encrypt every secret again with the first of the given keys."`
}

type secretsKeygenCommand struct {
	Key       string `type:"path" placeholder:"FILE" help:"File of the private key; an existing file is kept. By default the pair is printed."`
	Recipient string `type:"path" placeholder:"FILE" help:"Output file for the public key."`
	JSON      bool   `help:"Print one JSON object."`
}

// Run creates a key pair that encrypts secrets, or keeps the one in the file. It prints the public key or writes it to
// a file.
func (c *secretsKeygenCommand) Run(a *app) error {
	if c.Key == "" {
		if c.Recipient != "" {
			return usageError("recipient: requires --key, from which the public key is derived")
		}
		identity, recipient, err := secret.GenerateKeyPair()
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(map[string]string{"key": identity, "recipient": recipient})
		}
		_, err = terminal.Fprintf(a.Out, "# public key: %s\n%s\n", recipient, identity)
		return err
	}
	keys, err := secret.ReadKeyFile(c.Key)
	if err != nil {
		return err
	}
	recipient, err := secret.PublicKey(keys)
	if err != nil {
		return err
	}
	if c.Recipient != "" {
		if err := writePublicFile(c.Recipient, recipient+"\n"); err != nil {
			return fmt.Errorf("recipient: %w", err)
		}
	}
	if c.JSON {
		return a.printJSON(map[string]string{"recipient": recipient})
	}
	_, err = terminal.Fprintln(a.Out, recipient)
	return err
}

// writePublicFile replaces a file atomically and makes it readable for everybody.
func writePublicFile(path, content string) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // it was renamed by then, or is useless
	_, err = tmp.WriteString(content)
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

type secretsRotateCommand struct {
	installationFlags
	Key string `required:"" type:"existingfile" placeholder:"FILE" help:"File of private keys, one per line: the new key first, then the keys of the existing secrets."`
}

// Run encrypts every stored secret again, to the new key. It may be repeated.
func (c *secretsRotateCommand) Run(a *app) (err error) {
	text, err := os.ReadFile(c.Key)
	if err != nil {
		return fmt.Errorf("key: %w", err)
	}
	keys, err := secret.ParseIdentities(string(text))
	if err != nil {
		return err
	}
	recipients, err := secret.RecipientsOf(keys)
	if err != nil {
		return err
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	inst, err := c.openInstallation(ctx, a, "")
	if err != nil {
		return contextCause(ctx, err)
	}
	defer func() { err = errors.Join(err, inst.Close()) }()
	js, err := jetstream.New(inst.NATS)
	if err != nil {
		return err
	}
	n, err := reencryptSecrets(ctx, js, keys, recipients)
	if err != nil {
		return contextCause(ctx, fmt.Errorf("after %d secrets: %w", n, err))
	}
	if c.JSON {
		return a.printJSON(map[string]int{"secrets": n})
	}
	_, err = terminal.Fprintf(a.Out, "encrypted %d secrets again\n", n)
	return err
}

// reencryptSecrets decrypts every stored secret with keys, encrypts it to recipients, and returns the number of
// secrets.
func reencryptSecrets(ctx context.Context, js jetstream.JetStream, keys []age.Identity, recipients []age.Recipient) (n int, err error) {
	kv, err := secret.OpenBucket(ctx, js)
	if err != nil {
		return 0, err
	}
	opener, err := secret.NewOpener(kv, keys...)
	if err != nil {
		return 0, err
	}
	list, err := kv.ListKeys(ctx)
	if err != nil {
		return 0, fmt.Errorf("list secrets: %w", err)
	}
	for key := range list.Keys() {
		if err := opener.Reseal(ctx, key, recipients...); err != nil {
			return n, errors.Join(fmt.Errorf("secret %s: %w", key, err), list.Stop())
		}
		n++
	}
	return n, ctx.Err()
}
