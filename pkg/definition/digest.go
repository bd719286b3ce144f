package definition

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// Digest returns the version of a definition: the SHA-256, in hex, of its canonical JSON. spec is an
// events.AgentSpec, InstanceSpec or EnvironmentSpec. It fails only for numbers that JSON cannot represent, which a
// validated spec does not contain.
func Digest(spec any) (string, error) {
	b, err := CanonicalJSON(spec)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// CanonicalJSON returns the canonical JSON of a Go value: fields in declaration order, maps sorted by key, without HTML
// escapes, spaces or a final line feed.
func CanonicalJSON(spec any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(spec); err != nil {
		return nil, fmt.Errorf("canonical JSON of %T: %w", spec, err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
