// Package kvwatch follows a key-value bucket for as long as a service runs.
package kvwatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/retry"
)

// retryInterval is the pause before a bucket is watched again after a failure.
const retryInterval = time.Second

// WatchBucket watches a NATS key-value bucket until ctx ends, which is not an error. It passes every entry of the bucket to the
// function that begin returned, then nil, and then every change. When the watch ends early, for example because the
// bucket does not exist yet, WatchBucket logs the reason and starts again with a new function from begin. Calls are sequential.
func WatchBucket(ctx context.Context, js jetstream.JetStream, bucket string, logger *slog.Logger, begin func() func(jetstream.KeyValueEntry)) error {
	for {
		err := watchOnce(ctx, js, bucket, begin())
		if ctx.Err() != nil {
			return nil
		}
		logger.Warn("watch a bucket: trying again", "bucket", bucket, "error", err)
		if retry.Pause(ctx, retryInterval) != nil {
			return nil
		}
	}
}

// watchOnce watches the bucket and passes its entries to see, until ctx ends or the watch fails.
func watchOnce(ctx context.Context, js jetstream.JetStream, bucket string, see func(jetstream.KeyValueEntry)) (err error) {
	kv, err := js.KeyValue(ctx, bucket)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", bucket, err)
	}
	watcher, err := kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch bucket %s: %w", bucket, err)
	}
	defer func() { err = errors.Join(err, watcher.Stop()) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case entry, ok := <-watcher.Updates():
			if !ok {
				return errors.New("the watch ended")
			}
			see(entry)
		}
	}
}
