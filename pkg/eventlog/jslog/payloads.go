package jslog

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// payloadBucket is the object bucket of event data that is too large for a commit. It is opened on first use, so that a
// Log can be created while the server is unavailable.
type payloadBucket struct {
	log *Log

	mu     sync.Mutex
	bucket jetstream.ObjectStore
}

// openBucket returns the handle of the bucket, and opens the bucket on first use.
func (p *payloadBucket) openBucket(ctx context.Context) (jetstream.ObjectStore, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bucket != nil {
		return p.bucket, nil
	}
	b, err := p.log.js.ObjectStore(ctx, topology.BucketPayloads)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", topology.BucketPayloads, err)
	}
	p.bucket = b
	return b, nil
}

// objectName returns the name of the object with the data of a subject's event, by the SHA-256 of the data.
func objectName(owner events.Subject, digest string) string {
	return owner.Tenant + "/" + owner.ID + "/" + digest
}

// Put stores data unless the object exists. Concurrent writers of the same bytes are harmless.
func (p *payloadBucket) Put(ctx context.Context, owner events.Subject, digest string, data []byte) error {
	name := objectName(owner, digest)
	return p.retryUntilAnswered(ctx, digest, func(ctx context.Context, b jetstream.ObjectStore) error {
		info, err := b.GetInfo(ctx, name)
		if err == nil && info.Size == uint64(len(data)) {
			return nil
		}
		if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
			return err
		}
		_, err = b.PutBytes(ctx, name, data)
		return err
	})
}

// Get returns the data of an object; the caller verifies its digest. Objects of earlier builds, whose name is only the
// digest, are found too.
func (p *payloadBucket) Get(ctx context.Context, owner events.Subject, digest string) ([]byte, error) {
	var data []byte
	err := p.retryUntilAnswered(ctx, digest, func(ctx context.Context, b jetstream.ObjectStore) error {
		var err error
		data, err = b.GetBytes(ctx, objectName(owner, digest))
		if errors.Is(err, jetstream.ErrObjectNotFound) {
			data, err = b.GetBytes(ctx, digest)
		}
		return err
	})
	return data, err
}

// retryUntilAnswered calls do with the bucket until the server answers or ctx is done.
func (p *payloadBucket) retryUntilAnswered(ctx context.Context, digest string, do func(context.Context, jetstream.ObjectStore) error) error {
	t := p.log.appendBackoff() // objects are stored with a sync, as commits are
	for {
		try, cancel := context.WithTimeout(ctx, t.timeout())
		b, err := p.openBucket(try)
		if err == nil {
			err = do(try, b)
		}
		cancel()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, jetstream.ErrObjectNotFound):
			return eventlog.ErrNotFound
		case errors.Is(err, jetstream.ErrDigestMismatch):
			return &eventlog.PayloadError{Digest: digest, Reason: "the stored bytes do not match their digest"}
		case !isTransient(err):
			return fmt.Errorf("%w: %w", eventlog.ErrUnavailable, err)
		}
		if err := t.wait(ctx, err); err != nil {
			return err
		}
		p.log.logger.Log(ctx, t.logLevel(), "ask for a payload again", "digest", digest, "error", err)
	}
}
