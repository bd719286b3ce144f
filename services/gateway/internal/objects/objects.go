// Package objects stores content in the object store: files to put into a workspace, and skill ZIPs.
package objects

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Config configures a Store. JetStream is required; other zero fields mean the defaults.
type Config struct {
	JetStream    jetstream.JetStream
	Bucket       string         // "" means topology.BucketWorkspaces
	Room         *storage.Watch // nil skips the check
	SmallTimeout time.Duration  // timeout for content that is in memory; 0 means 30 s
}

// Store reads and writes the objects of one bucket of NATS's object store.
type Store struct {
	cfg Config

	mu     sync.Mutex
	bucket *natsstore.Store
}

// New returns a Store.
func New(cfg Config) *Store {
	if cfg.SmallTimeout == 0 {
		cfg.SmallTimeout = 30 * time.Second
	}
	if cfg.Bucket == "" {
		cfg.Bucket = topology.BucketWorkspaces
	}
	return &Store{cfg: cfg}
}

// openBucket opens the bucket on first use, so that a gateway starts while NATS is not available.
func (s *Store) openBucket(ctx context.Context) (*natsstore.Store, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bucket != nil {
		return s.bucket, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SmallTimeout)
	defer cancel()
	b, err := natsstore.Open(ctx, s.cfg.JetStream, s.cfg.Bucket)
	if err != nil {
		return nil, storeError(err)
	}
	b.SetRoomCheck(func(ctx context.Context) error { return s.cfg.Room.Check(ctx, 0) })
	s.bucket = b
	return b, nil
}

// CheckRoom returns a *problem.Error if the NATS store has no room for the given number of bytes; a negative number
// means an unknown size.
func (s *Store) CheckRoom(ctx context.Context, more int64) error {
	if err := s.cfg.Room.Check(ctx, max(more, 0)); err != nil {
		return storeError(err)
	}
	return nil
}

// storeError converts an error of the object store to a problem.
func storeError(err error) error {
	var reserved *storage.ReservedError
	if errors.As(err, &reserved) {
		return problem.StorageIsFull().WithCause(err)
	}
	return problem.New(problem.Unavailable, "", "NATS does not accept the content; nothing was done, try again").WithCause(err)
}

// PutBytes stores content under a name that is derived from it. Content that exists is stored again, because the janitor
// may be removing the copy of an earlier request. The error is a *problem.Error.
func (s *Store) PutBytes(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SmallTimeout)
	defer cancel()
	b, err := s.openBucket(ctx)
	if err != nil {
		return err
	}
	if err := b.Put(ctx, name, bytes.NewReader(data)); err != nil {
		return storeError(err)
	}
	return nil
}

// StoredObject describes the content of an object that PutStream has stored.
type StoredObject struct {
	Size   uint64 // bytes
	SHA256 string // hex
}

// ErrTooLarge is returned for content over the limit. The received part stays stored under the
// object's name, and no event refers to it.
var ErrTooLarge = errors.New("the content is over the limit")

// PutStream stores at most limit bytes of r under a new name. take is called before bytes are stored; its error ends the
// upload. Errors of r and take are wrapped; any other error is a *problem.Error. The bytes before an error may stay
// stored, until the janitor removes them. They keep their name even if the client disconnects, because content
// without a name cannot be assigned to a session.
func (s *Store) PutStream(ctx context.Context, name string, r io.Reader, limit int64, take func(context.Context, int64) error) (StoredObject, error) {
	b, err := s.openBucket(ctx)
	if err != nil {
		return StoredObject{}, err
	}
	in := &uploadReader{ctx: ctx, from: r, left: limit, take: take, sum: sha256.New()}
	err = b.Put(context.WithoutCancel(ctx), name, in)
	switch {
	case in.err != nil:
		return StoredObject{}, in.err
	case err != nil && ctx.Err() != nil:
		return StoredObject{}, problem.From(ctx.Err())
	case err != nil:
		return StoredObject{}, storeError(err)
	}
	return StoredObject{Size: in.read, SHA256: hex.EncodeToString(in.sum.Sum(nil))}, nil
}

// uploadReader counts and hashes the bytes that are read. On an error it reports the end of the content instead: otherwise
// the object store's client would purge the chunks, which this NATS user may not do, and leave them without a name.
type uploadReader struct {
	ctx  context.Context
	from io.Reader
	left int64
	take func(context.Context, int64) error
	read uint64
	sum  hash.Hash
	err  error
}

// Read implements io.Reader.
func (i *uploadReader) Read(p []byte) (n int, err error) {
	if want := i.left + 1; int64(len(p)) > want { // one byte over the limit is enough to detect it
		p = p[:want]
	}
	n, err = i.from.Read(p)
	if int64(n) > i.left {
		n, err = 0, ErrTooLarge
	}
	if n > 0 {
		terr := i.ctx.Err()
		if terr == nil {
			terr = i.take(i.ctx, int64(n))
		}
		if terr != nil {
			n, err = 0, terr
		}
	}
	i.left -= int64(n)
	i.read += uint64(n)
	i.sum.Write(p[:n])
	if err != nil && !errors.Is(err, io.EOF) {
		i.err = fmt.Errorf("read the content: %w", err)
		err = io.EOF
	}
	return n, err
}

// Get opens an object, for a workspace.Manifest. It returns workspace.ErrNotFound if there is none.
func (s *Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	b, err := s.openBucket(ctx)
	if err != nil {
		return nil, err
	}
	return b.Get(ctx, name)
}

// Has reports whether an object exists.
func (s *Store) Has(ctx context.Context, name string) (bool, error) {
	b, err := s.openBucket(ctx)
	if err != nil {
		return false, err
	}
	return b.Has(ctx, name)
}

// RemovedFunc returns a function that reports whether the object with a name no longer exists. The error of that
// function is a *problem.Error.
func (s *Store) RemovedFunc(name string) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		has, err := s.Has(ctx, name)
		if err != nil {
			return false, storeError(err)
		}
		return !has, nil
	}
}

// Put stores an object under a name, with the content that r returns.
func (s *Store) Put(ctx context.Context, name string, r io.Reader) error {
	b, err := s.openBucket(ctx)
	if err != nil {
		return err
	}
	return b.Put(ctx, name, r)
}
