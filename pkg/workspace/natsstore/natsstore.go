// Package natsstore keeps workspaces in a NATS object bucket.
package natsstore

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/workspace"
)

const (
	// chunkSize is a message of the bucket in bytes; it fits NATS's own limit of 1 MiB.
	chunkSize = 512 << 10
	// inFlight is how many chunks of an object may wait for their acknowledgement.
	inFlight = 16
	// stall is how long the bucket may neither take nor give a chunk.
	stall = 30 * time.Second
	// longest bounds reading one object. The client cuts off what has no deadline after five seconds.
	longest = 12 * time.Hour
)

var errStalled = errors.New("the object bucket does not answer")

// Store is a bucket.
type Store struct {
	js      jetstream.JetStream
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
	return &Store{js: js, objects: o, bucket: bucket}, nil
}

// Put stores an object as a whole, or not at all.
//
// The client's own Put sends as fast as it can read, and the server then drops
// what it cannot write in time: over some hundred megabytes nothing arrives. It
// also purges, for which services have no right. So the object is written here,
// as the client would (NATS ADR-20), a bounded number of chunks ahead. What a
// Put that fails has sent stays as chunks without a name.
func (s *Store) Put(ctx context.Context, name string, r io.Reader) error {
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}},
		Bucket:     s.bucket, NUID: rand.Text(),
	}
	if err := s.chunks(ctx, &info, r); err != nil {
		return fmt.Errorf("put %s into bucket %s: %w", name, s.bucket, err)
	}
	msg := nats.NewMsg("$O." + s.bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name)))
	msg.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	var err error
	if msg.Data, err = json.Marshal(info); err == nil {
		within, cancel := context.WithTimeoutCause(ctx, stall, errStalled)
		defer cancel()
		if _, err = s.js.PublishMsg(within, msg); err != nil && within.Err() != nil {
			err = context.Cause(within)
		}
	}
	if err != nil {
		return fmt.Errorf("put %s into bucket %s: %w", name, s.bucket, err)
	}
	return nil
}

// chunks sends the content and waits until it is stored.
func (s *Store) chunks(ctx context.Context, info *jetstream.ObjectInfo, r io.Reader) error {
	subject := "$O." + s.bucket + ".C." + info.NUID
	digest := sha256.New()
	var waiting []jetstream.PubAckFuture
	for ended := false; !ended || len(waiting) > 0; {
		if len(waiting) == inFlight || ended {
			if err := await(ctx, waiting[0]); err != nil {
				return err
			}
			waiting = waiting[1:]
			continue
		}
		chunk := make([]byte, chunkSize) // the client may send it again
		n, err := io.ReadFull(r, chunk)
		ended = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err = errors.Join(ctx.Err(), err); err != nil && !ended || ctx.Err() != nil {
			return err
		}
		if n == 0 {
			continue
		}
		digest.Write(chunk[:n]) //nolint:errcheck // a hash takes all
		ack, err := s.js.PublishMsgAsync(&nats.Msg{Subject: subject, Data: chunk[:n]})
		if err != nil {
			return err
		}
		waiting = append(waiting, ack)
		info.Size += uint64(n) //nolint:gosec // a count
		info.Chunks++
	}
	info.Digest = jetstream.GetObjectDigestValue(digest)
	return nil
}

// await waits until a chunk is stored.
func await(ctx context.Context, ack jetstream.PubAckFuture) error {
	patience := time.NewTimer(stall)
	defer patience.Stop()
	select {
	case <-ack.Ok():
		return nil
	case err := <-ack.Err():
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-patience.C:
		return errStalled
	}
}

// Get opens an object; workspace.ErrNotFound if there is none. Its content is
// checked against the digest that it was stored with.
func (s *Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	ctx, free := context.WithTimeout(ctx, longest)
	ctx, cancel := context.WithCancelCause(ctx)
	o := &object{s: s, name: name, ctx: ctx, free: func() { cancel(nil); free() }}
	o.patience = time.AfterFunc(stall, func() { cancel(errStalled) })
	r, err := s.objects.Get(ctx, name)
	o.patience.Stop()
	if err != nil {
		err = o.outcome(err)
		o.free()
		return nil, err
	}
	o.r = r
	return o, nil
}

// object is one that is being read. The bucket has to answer while it is waited
// for; how long the reader takes in between is its own affair.
type object struct {
	s        *Store
	name     string
	r        jetstream.ObjectResult
	ctx      context.Context
	patience *time.Timer
	free     func()
}

func (o *object) Read(p []byte) (int, error) {
	o.patience.Reset(stall)
	n, err := o.r.Read(p)
	o.patience.Stop()
	if err != nil && !errors.Is(err, io.EOF) {
		err = o.outcome(err)
	}
	return n, err
}

func (o *object) Close() error {
	o.patience.Stop()
	err := o.r.Close()
	o.free()
	return err
}

// outcome names an object that could not be read.
func (o *object) outcome(err error) error {
	if cause := context.Cause(o.ctx); cause != nil {
		err = cause
	}
	switch {
	case errors.Is(err, jetstream.ErrObjectNotFound):
		return fmt.Errorf("%s: %w", o.name, workspace.ErrNotFound)
	case errors.Is(err, jetstream.ErrDigestMismatch):
		return &workspace.CorruptError{Object: o.name, Err: err}
	}
	return fmt.Errorf("get %s from bucket %s: %w", o.name, o.s.bucket, err)
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
