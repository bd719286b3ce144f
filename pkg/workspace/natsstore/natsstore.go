// Package natsstore keeps workspaces in a NATS object bucket.
package natsstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/workspace"
)

const (
	// chunkSize is a message of the bucket in bytes; it fits NATS's own limit of 1 MiB.
	chunkSize = 512 << 10
	// stall is how long a store may neither take nor give a chunk.
	stall = 30 * time.Second
	// longest bounds one object. The client cuts off what has no deadline after five seconds.
	longest = 12 * time.Hour
)

// Store is a bucket.
type Store struct {
	objects jetstream.ObjectStore
	bucket  string
}

// Open finds a bucket, such as topology.BucketWorkspaces. One that is not
// installed is an error that says so.
func Open(ctx context.Context, js jetstream.JetStream, bucket string) (*Store, error) {
	o, err := js.ObjectStore(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, fmt.Errorf("object bucket %s is not installed on this NATS: install Spool's streams first", bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("open object bucket %s: %w", bucket, err)
	}
	return &Store{objects: o, bucket: bucket}, nil
}

// watch is a context that ends when nothing moved for a while.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	free   func()
}

var errStalled = errors.New("the object store does not answer")

func newWatch(ctx context.Context) *watch {
	w := &watch{}
	var free context.CancelFunc
	ctx, free = context.WithTimeout(ctx, longest)
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(stall, func() { w.cancel(errStalled) })
	w.free = func() { w.timer.Stop(); w.cancel(nil); free() }
	return w
}

// moved starts the wait again.
func (w *watch) moved() { w.timer.Reset(stall) }

// why gives the reason of err, which may be the end of the context.
func (w *watch) why(err error) error {
	if cause := context.Cause(w.ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// Put stores an object as a whole, or not at all.
func (s *Store) Put(ctx context.Context, name string, r io.Reader) error {
	w := newWatch(ctx)
	defer w.free()
	meta := jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}}
	from := &filled{r: r, w: w}
	if _, err := s.objects.Put(w.ctx, meta, from); err != nil {
		if from.err != nil {
			return from.err
		}
		return fmt.Errorf("put %s into bucket %s: %w", name, s.bucket, w.why(err))
	}
	return nil
}

// filled reads as much as is asked for: the client makes a message of each read.
type filled struct {
	r   io.Reader
	w   *watch
	err error
}

func (f *filled) Read(p []byte) (int, error) {
	n, err := io.ReadFull(f.r, p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	if err != nil && !errors.Is(err, io.EOF) {
		f.err = err
	}
	f.w.moved()
	return n, err
}

// Get opens an object; workspace.ErrNotFound if there is none. Its content is
// checked against the digest that it was stored with.
func (s *Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	w := newWatch(ctx)
	r, err := s.objects.Get(w.ctx, name)
	if err != nil {
		err = s.outcome(name, w.why(err))
		w.free()
		return nil, err
	}
	return &object{r, w, s, name}, nil
}

// outcome names an object that could not be read.
func (s *Store) outcome(name string, err error) error {
	switch {
	case errors.Is(err, jetstream.ErrObjectNotFound):
		return fmt.Errorf("%s: %w", name, workspace.ErrNotFound)
	case errors.Is(err, jetstream.ErrDigestMismatch):
		return &workspace.CorruptError{Object: name, Err: err}
	}
	return fmt.Errorf("get %s from bucket %s: %w", name, s.bucket, err)
}

type object struct {
	jetstream.ObjectResult
	w    *watch
	s    *Store
	name string
}

func (o *object) Read(p []byte) (int, error) {
	n, err := o.ObjectResult.Read(p)
	o.w.moved()
	if err != nil && !errors.Is(err, io.EOF) {
		err = o.s.outcome(o.name, o.w.why(err))
	}
	return n, err
}

func (o *object) Close() error {
	err := o.ObjectResult.Close()
	o.w.free()
	return err
}

// Has tells whether there is an object.
func (s *Store) Has(ctx context.Context, name string) (bool, error) {
	_, err := s.objects.GetInfo(ctx, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for %s in bucket %s: %w", name, s.bucket, err)
	}
	return true, nil
}
