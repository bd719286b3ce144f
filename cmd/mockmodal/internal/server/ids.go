package server

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"regexp"
	"time"
)

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// newSuffix returns n random letters and digits.
func newSuffix(n int) string {
	raw := make([]byte, n)
	_, _ = rand.Read(raw) // never fails
	for i := range raw {
		raw[i] = base62[int(raw[i])%len(base62)]
	}
	return string(raw)
}

// newID returns an id as Modal's first backend makes them: the prefix and 22
// letters and digits.
func newID(prefix string) string { return prefix + "-" + newSuffix(22) }

var crockford = base32.NewEncoding("0123456789ABCDEFGHJKMNPQRSTVWXYZ").WithPadding(base32.NoPadding)

// newV2ID returns an id as Modal's second backend makes them: the prefix and
// 26 characters that begin with the time.
func newV2ID(prefix string) string {
	raw := make([]byte, 16)
	_, _ = rand.Read(raw) // never fails
	var now [8]byte
	binary.BigEndian.PutUint64(now[:], uint64(time.Now().UnixMilli()))
	copy(raw, now[2:])
	return prefix + "-" + crockford.EncodeToString(raw)
}

// Syntax of names, from the SDK's name_utils.go.
var (
	objectName      = regexp.MustCompile(`^[a-zA-Z0-9\-_.]{1,64}$`)
	appID           = regexp.MustCompile(`^ap-[a-zA-Z0-9]{22}$`)
	environmentName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$`)
	imageTag        = regexp.MustCompile(`^([a-zA-Z0-9\-_.]+/)*([a-zA-Z0-9\-_.]{1,64}):([a-zA-Z0-9\-_.]{1,64})$`)
)

// isObjectName reports whether Modal accepts a name for an object. A name must not look like the id of an app.
func isObjectName(name string) bool { return objectName.MatchString(name) && !appID.MatchString(name) }
