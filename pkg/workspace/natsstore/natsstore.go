// Package natsstore stores workspaces in a NATS object bucket.
package natsstore

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/workspace"
)

const (
	// chunkSize is the size in bytes of a chunk, which is one message of the bucket; it is below NATS's default limit of 1
	// MiB.
	chunkSize = 512 << 10
	// maxInFlight is the maximum number of chunks of an object that are sent before the first of them is acknowledged.
	maxInFlight = 16
	// stallTimeout is the time after which an upload or a download without progress fails.
	stallTimeout = 30 * time.Second
	// requestTimeout is the time limit of a single request to the bucket.
	requestTimeout = 5 * time.Second
	// retryInterval is the pause before a request is repeated.
	retryInterval = 100 * time.Millisecond
	// maxMissingResponses is the number of responses that a chunk is missing after which the object counts as corrupt.
	maxMissingResponses = 20
)

// errStalled is returned if the NATS server does not respond within stallTimeout.
var errStalled = errors.New("the object bucket does not respond")

// Store reads and writes the objects of a NATS object bucket.
type Store struct {
	js      jetstream.JetStream
	objects jetstream.ObjectStore
	stream  jetstream.Stream // the stream of the bucket
	bucket  string
	room    func(context.Context) error // nil: no check
}

// SetRoomCheck sets a function that Put calls before each chunk; Put returns its error. SetRoomCheck must be called
// before the first Put.
func (s *Store) SetRoomCheck(room func(context.Context) error) { s.room = room }

// Open opens an object bucket, such as topology.BucketWorkspaces. The error states if the bucket is not installed.
func Open(ctx context.Context, js jetstream.JetStream, bucket string) (*Store, error) {
	o, err := js.ObjectStore(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, fmt.Errorf("object bucket %s is not installed on this NATS: install Spool's streams first", bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("open object bucket %s: %w", bucket, err)
	}
	stream, err := js.Stream(ctx, "OBJ_"+bucket)
	if err != nil {
		return nil, fmt.Errorf("open object bucket %s: %w", bucket, err)
	}
	return &Store{js: js, objects: o, stream: stream, bucket: bucket}, nil
}

// Put stores an object completely or not at all: readers see the object only after Put has stored all of it.
//
// The Put of the NATS client sends as fast as it can read, and the server drops what it cannot write in time: above
// some hundred megabytes nothing arrives. It also purges, for which services have no permission. This Put therefore
// writes the object in the client's format (NATS ADR-20) with a bounded number of unacknowledged chunks. The chunks of
// a failed Put remain in the bucket without a name.
func (s *Store) Put(ctx context.Context, name string, r io.Reader) error {
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}},
		Bucket:     s.bucket, NUID: rand.Text(),
	}
	if err := s.putChunks(ctx, &info, r); err != nil {
		return fmt.Errorf("put %s into bucket %s: %w", name, s.bucket, err)
	}
	msg := nats.NewMsg("$O." + s.bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name)))
	msg.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	var err error
	if msg.Data, err = json.Marshal(info); err == nil {
		within, cancel := context.WithTimeoutCause(ctx, stallTimeout, errStalled)
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

// putChunks publishes the content of r in chunks, blocks until all are stored, and sets the size, the digest and the
// number of chunks in info.
func (s *Store) putChunks(ctx context.Context, info *jetstream.ObjectInfo, r io.Reader) error {
	subject := "$O." + s.bucket + ".C." + info.NUID
	digest := sha256.New()
	var waiting []jetstream.PubAckFuture
	for ended := false; !ended || len(waiting) > 0; {
		if len(waiting) == maxInFlight || ended {
			if err := awaitChunkAck(ctx, waiting[0]); err != nil {
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
		if s.room != nil {
			if err := s.room(ctx); err != nil {
				return err
			}
		}
		digest.Write(chunk[:n]) //nolint:errcheck // a hash never fails
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

// awaitChunkAck blocks until a chunk is stored. It returns errStalled if the server does not acknowledge the chunk
// within stallTimeout.
func awaitChunkAck(ctx context.Context, ack jetstream.PubAckFuture) error {
	patience := time.NewTimer(stallTimeout)
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

// Get opens an object, or returns workspace.ErrNotFound. The reader verifies the content against the digest with which
// it was stored.
//
// The reader of the NATS client holds a lock while it waits for a chunk, and ignores its context meanwhile: after its
// context ends it blocks until its deadline. Get therefore requests the chunks one by one, which also needs no
// consumer.
func (s *Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	within, cancel := context.WithTimeoutCause(ctx, stallTimeout, errStalled)
	defer cancel()
	info, err := s.objects.GetInfo(within, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, fmt.Errorf("%s: %w", name, workspace.ErrNotFound)
	}
	if err != nil {
		return nil, s.getError(within, name, err)
	}
	ctx, cancel = context.WithCancel(ctx)
	return &objectReader{s: s, name: name, ctx: ctx, cancel: cancel, info: info, digest: sha256.New()}, nil
}

// getError returns err with the name of the object that could not be read. If ctx has ended, the cause of its end
// replaces err.
func (s *Store) getError(ctx context.Context, name string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("get %s from bucket %s: %w", name, s.bucket, err)
}

// objectReader reads the chunks of an object. Only one goroutine may read, but any may call Close, which aborts a Read.
type objectReader struct {
	s      *Store
	name   string
	ctx    context.Context
	cancel context.CancelFunc
	info   *jetstream.ObjectInfo
	digest hash.Hash

	have   []byte // unread rest of the last chunk
	chunks uint32 // number of fetched chunks
	seq    uint64 // sequence of the last chunk
	err    error  // returned after have is empty
}

func (o *objectReader) Read(p []byte) (int, error) {
	for len(o.have) == 0 {
		switch {
		case o.err != nil:
			return 0, o.err
		case o.chunks < o.info.Chunks:
			o.have, o.err = o.nextChunk()
		case jetstream.GetObjectDigestValue(o.digest) != o.info.Digest && o.info.Size > 0:
			o.err = &workspace.CorruptError{Object: o.name, Err: fmt.Errorf("its digest is %s, not %s", jetstream.GetObjectDigestValue(o.digest), o.info.Digest)}
		default:
			o.err = io.EOF
		}
	}
	n := copy(p, o.have)
	o.have = o.have[n:]
	return n, nil
}

// nextChunk returns the next chunk. It requests a chunk again if the chunk is missing, because a replica of the stream
// may lag, or if the server does not respond. It returns a *workspace.CorruptError after maxMissingResponses responses
// that the chunk is missing.
func (o *objectReader) nextChunk() ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(o.ctx, stallTimeout, errStalled)
	defer cancel()
	subject := "$O." + o.s.bucket + ".C." + o.info.NUID
	absent := 0
	for {
		try, end := context.WithTimeout(ctx, requestTimeout)
		m, err := o.s.stream.GetMsg(try, o.seq+1, jetstream.WithGetMsgSubject(subject))
		end()
		switch {
		case err == nil:
			o.chunks, o.seq = o.chunks+1, m.Sequence
			o.digest.Write(m.Data) //nolint:errcheck // a hash never fails
			return m.Data, nil
		case errors.Is(err, jetstream.ErrMsgNotFound):
			if absent++; absent > maxMissingResponses {
				return nil, &workspace.CorruptError{Object: o.name, Err: fmt.Errorf("only %[2]d of %[1]d chunks exist", o.info.Chunks, o.chunks)}
			}
		}
		if retry.Pause(ctx, retryInterval) != nil {
			return nil, o.s.getError(ctx, o.name, err)
		}
	}
}

func (o *objectReader) Close() error {
	o.cancel()
	return nil
}

// Has reports whether an object exists in the bucket.
func (s *Store) Has(ctx context.Context, name string) (bool, error) {
	at, err := s.StoredAt(ctx, name)
	return !at.IsZero(), err
}

// StoredAt returns when an object was stored, by the server's clock, or the zero time if it does not exist.
func (s *Store) StoredAt(ctx context.Context, name string) (time.Time, error) {
	within, cancel := context.WithTimeoutCause(ctx, stallTimeout, errStalled)
	defer cancel()
	info, err := s.objects.GetInfo(within, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, s.getError(within, name, err)
	}
	return info.ModTime, nil
}
