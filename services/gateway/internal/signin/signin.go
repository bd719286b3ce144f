// Package signin exchanges proofs of identity for sessions. It stores codes and sessions in NATS, so that all gateways
// share them: one gateway may create a code, another one exchange it, and a third one serve the session. Only hashes are
// stored.
package signin

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Config configures a Store. All fields are required.
type Config struct {
	JetStream jetstream.JetStream
	Now       func() time.Time
	Entropy   io.Reader
	Logger    *slog.Logger
	// CookieLifetime is the maximum lifetime of a session with a cookie, however often it is renewed.
	CookieLifetime time.Duration
}

// renewAfter is the time between two renewals of a session with a cookie, so that few requests write to NATS.
const renewAfter = topology.SignInSessionTTL / 8

// Store creates and reads codes and sessions. It is safe for concurrent use.
type Store struct {
	cfg             Config
	codes, sessions bucket
}

// New returns a Store. It opens the buckets on first use, so that a gateway starts while NATS is not available.
func New(cfg Config) *Store {
	return &Store{cfg: cfg, codes: bucket{js: cfg.JetStream, name: topology.BucketSignInCodes}, sessions: bucket{js: cfg.JetStream, name: topology.BucketSignInSessions}}
}

// record is the value of both buckets.
type record struct {
	SHA256 string     `json:"sha256"` // of the code or credential, in hex
	Grant  auth.Grant `json:"grant"`
}

// CreateCode returns a new code for a grant. NATS removes the code after topology.SignInCodeTTL.
func (s *Store) CreateCode(ctx context.Context, g auth.Grant) (string, error) {
	return s.create(ctx, &s.codes, auth.CodePrefix, g)
}

// TakeCode removes a code and returns its grant. Of several calls with the same code one succeeds. ok is false if the code
// was taken, has expired, or never existed.
func (s *Store) TakeCode(ctx context.Context, code string) (g auth.Grant, ok bool, err error) {
	if !auth.IsWellFormedToken(auth.CodePrefix, code) {
		return g, false, nil
	}
	hash := auth.HashKey(code)
	r, revision, ok, err := s.codes.find(ctx, hash)
	if err != nil || !ok {
		return g, false, err
	}
	kv, err := s.codes.open(ctx)
	if err != nil {
		return g, false, err
	}
	err = kv.Delete(ctx, entryName(hash), jetstream.LastRevision(revision))
	if isWrongRevision(err) { // another call was faster
		return g, false, nil
	}
	if err != nil {
		return g, false, unavailable(err)
	}
	return r.Grant, true, nil
}

// CreateSession returns a new session credential for a grant, and when it expires.
func (s *Store) CreateSession(ctx context.Context, g auth.Grant) (credential string, expires time.Time, err error) {
	g.Expires = s.cfg.Now().Add(topology.SignInSessionTTL).UTC().Truncate(time.Millisecond)
	credential, err = s.create(ctx, &s.sessions, auth.SessionPrefix, g)
	return credential, g.Expires, err
}

// CreateCookie returns the value of a new session cookie for a grant, and when the session ends at the latest. The session
// ends before that if it is not used for topology.SignInSessionTTL.
func (s *Store) CreateCookie(ctx context.Context, g auth.Grant) (value string, until time.Time, err error) {
	now := s.cfg.Now().UTC().Truncate(time.Millisecond)
	g.Until = now.Add(s.cfg.CookieLifetime)
	g.Expires = earlier(now.Add(topology.SignInSessionTTL), g.Until)
	value, err = s.create(ctx, &s.sessions, auth.CookiePrefix, g)
	return value, g.Until, err
}

// Session returns the grant of the session credential or cookie with a hash, and renews the session of a cookie. ok is
// false if there is none, or it has expired.
func (s *Store) Session(ctx context.Context, hash string) (g auth.Grant, ok bool, err error) {
	r, revision, ok, err := s.sessions.find(ctx, hash)
	now := s.cfg.Now()
	if err != nil || !ok || !now.Before(r.Grant.Expires) {
		return g, false, err
	}
	// A session that cannot be renewed now still is valid, and the next request tries again.
	if err := s.renew(ctx, r, revision, now); err != nil {
		s.cfg.Logger.Warn("renew a session", "error", err)
	}
	return r.Grant, true, nil
}

// renew stores the session of a cookie with a later expiry if it was used for long enough.
func (s *Store) renew(ctx context.Context, r record, revision uint64, now time.Time) error {
	idle := now.Add(topology.SignInSessionTTL)
	expires := earlier(idle, r.Grant.Until).UTC().Truncate(time.Millisecond)
	if idle.Sub(r.Grant.Expires) < renewAfter || !expires.After(r.Grant.Expires) {
		return nil
	}
	r.Grant.Expires = expires
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode a grant: %w", err)
	}
	kv, err := s.sessions.open(ctx)
	if err != nil {
		return err
	}
	// The expected revision keeps a renewal from restoring a session that was ended in the meantime.
	if _, err = kv.Update(ctx, entryName(r.SHA256), raw, revision); isWrongRevision(err) {
		return nil
	}
	return err
}

// EndSession removes the session of the session credential or cookie with a hash. Without such a session it has no effect.
func (s *Store) EndSession(ctx context.Context, hash string) error {
	for {
		_, revision, ok, err := s.sessions.find(ctx, hash)
		if err != nil || !ok {
			return err
		}
		kv, err := s.sessions.open(ctx)
		if err != nil {
			return err
		}
		if err := kv.Delete(ctx, entryName(hash), jetstream.LastRevision(revision)); !isWrongRevision(err) {
			return unavailable(err)
		}
	}
}

// earlier returns the earlier one of two times.
func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// create stores a grant under the hash of a new token with a prefix, and returns the token.
func (s *Store) create(ctx context.Context, b *bucket, prefix string, g auth.Grant) (string, error) {
	token, err := auth.NewToken(prefix, s.cfg.Entropy)
	if err != nil {
		return "", err
	}
	hash := auth.HashKey(token)
	raw, err := json.Marshal(record{hash, g})
	if err != nil {
		return "", fmt.Errorf("encode a grant: %w", err)
	}
	kv, err := b.open(ctx)
	if err != nil {
		return "", err
	}
	if _, err := kv.Create(ctx, entryName(hash), raw); err != nil {
		return "", unavailable(err)
	}
	return token, nil
}

// entryName returns the name of the entry of a token in its bucket: the first half of its hash. The whole hash is in the
// entry and is compared in constant time, so the time of an answer says nothing about the rest of a hash.
func entryName(hash string) string { return hash[:len(hash)/2] }

// bucket is a key-value bucket that is opened on first use.
type bucket struct {
	js   jetstream.JetStream
	name string

	mu sync.Mutex
	kv jetstream.KeyValue
}

// open returns the bucket in NATS.
func (b *bucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kv != nil {
		return b.kv, nil
	}
	kv, err := b.js.KeyValue(ctx, b.name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, problem.New(problem.Unavailable, "", "NATS has no bucket "+b.name+": run spool provision of this version").WithCause(err)
	}
	if err != nil {
		return nil, unavailable(err)
	}
	b.kv = kv
	return kv, nil
}

// find returns the record of the token with a hash, and its revision.
func (b *bucket) find(ctx context.Context, hash string) (r record, revision uint64, ok bool, err error) {
	kv, err := b.open(ctx)
	if err != nil {
		return r, 0, false, err
	}
	entry, err := kv.Get(ctx, entryName(hash))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return r, 0, false, nil
	}
	if err != nil {
		return r, 0, false, unavailable(err)
	}
	if err := json.Unmarshal(entry.Value(), &r); err != nil {
		return r, 0, false, fmt.Errorf("bucket %s: decode an entry: %w", b.name, err)
	}
	return r, entry.Revision(), subtle.ConstantTimeCompare([]byte(r.SHA256), []byte(hash)) == 1, nil
}

// isWrongRevision reports whether an entry was changed or removed in the meantime.
func isWrongRevision(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence
}

// unavailable returns the problem UNAVAILABLE for an error of NATS, or nil for nil.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return problem.New(problem.Unavailable, "", "codes and session credentials cannot be read or stored: NATS does not respond; try again").WithCause(err)
}
