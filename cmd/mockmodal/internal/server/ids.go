package server

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"regexp"
	"time"
)

// base62Digits are the characters of ids of Modal's first backend.
const base62Digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// randomSuffix returns n random letters and digits.
func randomSuffix(n int) string {
	raw := make([]byte, n)
	_, _ = rand.Read(raw) // never fails
	for i := range raw {
		raw[i] = base62Digits[int(raw[i])%len(base62Digits)]
	}
	return string(raw)
}

// newV1ID returns an id in the format of Modal's first backend: the prefix and 22 random letters and digits.
func newV1ID(prefix string) string { return prefix + "-" + randomSuffix(22) }

// crockfordBase32 is the base32 encoding of ids of Modal's second backend.
var crockfordBase32 = base32.NewEncoding("0123456789ABCDEFGHJKMNPQRSTVWXYZ").WithPadding(base32.NoPadding)

// newV2ID returns an id in the format of Modal's second backend: the prefix and 26 characters that begin with the time.
func newV2ID(prefix string) string {
	raw := make([]byte, 16)
	_, _ = rand.Read(raw) // never fails
	var now [8]byte
	binary.BigEndian.PutUint64(now[:], uint64(time.Now().UnixMilli()))
	copy(raw, now[2:])
	return prefix + "-" + crockfordBase32.EncodeToString(raw)
}

// Syntax of names, from the SDK's name_utils.go.
var (
	objectNamePattern      = regexp.MustCompile(`^[a-zA-Z0-9\-_.]{1,64}$`)
	appIDPattern           = regexp.MustCompile(`^ap-[a-zA-Z0-9]{22}$`)
	environmentNamePattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$`)
	imageTagPattern        = regexp.MustCompile(`^([a-zA-Z0-9\-_.]+/)*([a-zA-Z0-9\-_.]{1,64}):([a-zA-Z0-9\-_.]{1,64})$`)
)

// isObjectName reports whether Modal accepts a name for an object. A name must not look like the id of an app.
func isObjectName(name string) bool {
	return objectNamePattern.MatchString(name) && !appIDPattern.MatchString(name)
}
