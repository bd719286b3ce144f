// Package objects keeps content in the object store: files on their way into a
// workspace, ZIPs of skills.
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

// Config of a Store. JetStream is required.
type Config struct {
	JetStream jetstream.JetStream
	Bucket    string         // "" means topology.BucketWorkspaces
	Room      *storage.Watch // nil: not asked
	Quick     time.Duration  // how long content that is in memory may take to be stored; 0 means 30 s
}

// Store reads and writes a bucket.
type Store struct {
	cfg Config

	mu     sync.Mutex
	bucket *natsstore.Store
}

// New makes a Store.
func New(cfg Config) *Store {
	if cfg.Quick == 0 {
		cfg.Quick = 30 * time.Second
	}
	if cfg.Bucket == "" {
		cfg.Bucket = topology.BucketWorkspaces
	}
	return &Store{cfg: cfg}
}

// open looks the bucket up when it is first needed, so that a gateway starts while NATS is away.
func (s *Store) open(ctx context.Context) (*natsstore.Store, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bucket != nil {
		return s.bucket, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Quick)
	defer cancel()
	b, err := natsstore.Open(ctx, s.cfg.JetStream, s.cfg.Bucket)
	if err != nil {
		return nil, away(err)
	}
	b.CheckRoom(func(ctx context.Context) error { return s.cfg.Room.Check(ctx, 0) })
	s.bucket = b
	return b, nil
}

// CheckRoom returns a *problem.Error if the store of NATS has no room for more bytes; a negative number is an unknown one.
func (s *Store) CheckRoom(ctx context.Context, more int64) error {
	if err := s.cfg.Room.Check(ctx, max(more, 0)); err != nil {
		return away(err)
	}
	return nil
}

func away(err error) error {
	var reserved *storage.ReservedError
	if errors.As(err, &reserved) {
		return problem.StorageIsFull().Because(err)
	}
	return problem.New(problem.Unavailable, "", "NATS does not take the content; nothing was done, try again").Because(err)
}

// Keep stores content under a name that says what it is. Content that is there is
// stored again: the janitor may be removing what an earlier request left. The error
// is a *problem.Error.
func (s *Store) Keep(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Quick)
	defer cancel()
	b, err := s.open(ctx)
	if err != nil {
		return err
	}
	if err := b.Put(ctx, name, bytes.NewReader(data)); err != nil {
		return away(err)
	}
	return nil
}

// Stored is content that was stored.
type Stored struct {
	Size   uint64 // bytes
	SHA256 string // hex
}

// ErrTooLarge is content over the limit. What came of it is stored under the name
// and belongs to nobody.
var ErrTooLarge = errors.New("the content is over the limit")

// Stream stores what r gives, at most limit bytes, under a new name. take is called before bytes are stored, and an error of it ends
// the upload. An error of r or take is wrapped, else the error is a *problem.Error. What came before an error may stay under the name,
// for the janitor to remove; so it does when the client is gone, since content without a name cannot be told whose it is.
func (s *Store) Stream(ctx context.Context, name string, r io.Reader, limit int64, take func(context.Context, int64) error) (Stored, error) {
	b, err := s.open(ctx)
	if err != nil {
		return Stored{}, err
	}
	in := &intake{ctx: ctx, from: r, left: limit, take: take, sum: sha256.New()}
	err = b.Put(context.WithoutCancel(ctx), name, in)
	switch {
	case in.err != nil:
		return Stored{}, in.err
	case err != nil && ctx.Err() != nil:
		return Stored{}, problem.From(ctx.Err())
	case err != nil:
		return Stored{}, away(err)
	}
	return Stored{Size: in.read, SHA256: hex.EncodeToString(in.sum.Sum(nil))}, nil
}

// intake counts and hashes what is read. It ends where something is wrong, in
// place of failing: the client of the object store would then purge the chunks,
// which this user may not, and leave them without a name.
type intake struct {
	ctx  context.Context
	from io.Reader
	left int64
	take func(context.Context, int64) error
	read uint64
	sum  hash.Hash
	err  error
}

// Read reads, and looks.
func (i *intake) Read(p []byte) (n int, err error) {
	if want := i.left + 1; int64(len(p)) > want { // one byte over the limit says enough
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

// Get opens an object, for a workspace.Manifest; workspace.ErrNotFound if there is none.
func (s *Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	b, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	return b.Get(ctx, name)
}

// Has tells whether there is an object.
func (s *Store) Has(ctx context.Context, name string) (bool, error) {
	b, err := s.open(ctx)
	if err != nil {
		return false, err
	}
	return b.Has(ctx, name)
}

// Gone returns a function that reports whether there is no object of a name any more. Its error is a *problem.Error.
func (s *Store) Gone(name string) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		has, err := s.Has(ctx, name)
		if err != nil {
			return false, away(err)
		}
		return !has, nil
	}
}

// Put stores an object.
func (s *Store) Put(ctx context.Context, name string, r io.Reader) error {
	b, err := s.open(ctx)
	if err != nil {
		return err
	}
	return b.Put(ctx, name, r)
}
