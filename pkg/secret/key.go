package secret

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"filippo.io/age"
)

// ParseIdentities parses private keys (AGE-SECRET-KEY-1…), one a line. Lines that begin with # are skipped. Each key
// can decrypt secrets that were sealed to it.
func ParseIdentities(text string) ([]age.Identity, error) {
	list, err := age.ParseIdentities(strings.NewReader(text))
	if err != nil {
		// The library's error contains the line number but no key.
		return nil, fmt.Errorf("secrets key: %w", err)
	}
	return list, nil
}

// ParseRecipients parses public keys (age1…), one a line or separated by commas.
func ParseRecipients(text string) ([]age.Recipient, error) {
	list, err := age.ParseRecipients(strings.NewReader(strings.ReplaceAll(text, ",", "\n")))
	if err != nil {
		return nil, fmt.Errorf("secrets recipient: %w", err)
	}
	return list, nil
}

// RecipientsOf returns the public key of the first private key. Older keys only open secrets that were sealed
// earlier.
func RecipientsOf(list []age.Identity) ([]age.Recipient, error) {
	for _, id := range list {
		switch k := id.(type) {
		case *age.X25519Identity:
			return []age.Recipient{k.Recipient()}, nil
		case *kmsKey:
			return []age.Recipient{k}, nil
		}
	}
	return nil, errors.New("secrets key: no public key follows from it")
}

// PublicKey returns the text of the public key to which new secrets are sealed: that of the first private key.
func PublicKey(list []age.Identity) (string, error) {
	recipients, err := RecipientsOf(list)
	if err != nil {
		return "", err
	}
	if k, ok := recipients[0].(fmt.Stringer); ok {
		return k.String(), nil
	}
	return "", errors.New("secrets key: its public key has no text")
}

// GenerateKeyPair returns a new pair of private key (identity) and public key (recipient) in age's text form.
func GenerateKeyPair() (identity, recipient string, err error) {
	k, err := age.GenerateX25519Identity()
	if err != nil {
		return "", "", fmt.Errorf("make a secrets key: %w", err)
	}
	return k.String(), k.Recipient().String(), nil
}

// ReadKeyFile returns the private keys in a file. If the file does not exist, ReadKeyFile creates it with a new key,
// readable by its owner only.
func ReadKeyFile(path string) ([]age.Identity, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createKeyFile(path); err != nil {
			return nil, err
		}
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("secrets key: %w", err)
	}
	return ParseIdentities(string(text))
}

// createKeyFile creates a file with a new private key, unless another process has created the file in the meantime.
func createKeyFile(path string) error {
	identity, recipient, err := GenerateKeyPair()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("secrets key: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".secrets-key-*") // 0600
	if err != nil {
		return fmt.Errorf("secrets key: %w", err)
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // after success it is linked under its final name; after a failure it is useless
	_, err = fmt.Fprintf(tmp, "# public key: %s\n%s\n", recipient, identity)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return fmt.Errorf("secrets key: %w", err)
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("secrets key: %w", err)
	}
	return nil
}

// KMS is a key management service that encrypts the key of each value, as an alternative to a key pair. The key of the
// service never leaves the service.
type KMS interface {
	// Wrap encrypts 16 bytes and returns the id of the key that it used.
	Wrap(ctx context.Context, key []byte) (keyID string, wrapped []byte, err error)
	// Unwrap decrypts the result of Wrap.
	Unwrap(ctx context.Context, keyID string, wrapped []byte) ([]byte, error)
}

// KeyFromKMS returns a key, both recipient and identity, that encrypts and decrypts with a KMS. ctx bounds all calls of
// the KMS.
func KeyFromKMS(ctx context.Context, kms KMS) interface {
	age.Recipient
	age.Identity
} {
	return &kmsKey{ctx, kms}
}

// kmsStanzaType is the type name of the KMS's stanza in the header of a sealed value.
const kmsStanzaType = "spool-kms"

type kmsKey struct {
	ctx context.Context
	kms KMS
}

func (w *kmsKey) Wrap(fileKey []byte) ([]*age.Stanza, error) {
	id, body, err := w.kms.Wrap(w.ctx, fileKey)
	if err != nil {
		return nil, fmt.Errorf("wrap a key: %w", err)
	}
	return []*age.Stanza{{Type: kmsStanzaType, Args: []string{id}, Body: body}}, nil
}

func (w *kmsKey) Unwrap(list []*age.Stanza) ([]byte, error) {
	for _, s := range list {
		if s.Type == kmsStanzaType && len(s.Args) == 1 {
			return w.kms.Unwrap(w.ctx, s.Args[0], s.Body)
		}
	}
	return nil, age.ErrIncorrectIdentity
}
