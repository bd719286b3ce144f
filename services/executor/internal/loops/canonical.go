package loops

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
)

// canonicalJSON returns the arguments of a tool call in a form that does not depend on the order of keys, white space
// or escapes. It returns arguments that are not valid JSON unchanged.
func canonicalJSON(raw json.RawMessage) []byte {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return raw
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return raw
	}
	out, err := json.Marshal(v)
	if err != nil {
		return raw
	}
	return out
}

// hashParts returns a hash of parts. The hash depends on where one part ends and the next one begins.
func hashParts(parts ...[]byte) (sum callHash) {
	h := sha256.New()
	for _, p := range parts {
		var size [8]byte
		binary.BigEndian.PutUint64(size[:], uint64(len(p)))
		h.Write(size[:]) // a hash returns no error
		h.Write(p)
	}
	copy(sum[:], h.Sum(nil))
	return sum
}
