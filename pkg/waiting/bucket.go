package waiting

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// An Entry is what an executor writes about the wait of an execution. All times are those of the clock of the streams.
type Entry struct {
	Execution string `json:"execution"`
	// Holder is the executor that claimed the execution last, and Attempt the number of attempts that were started. An
	// Entry no longer applies when the execution has other ones.
	Holder  string `json:"holder,omitempty"`
	Attempt uint32 `json:"attempt,omitempty"`

	Reason Reason    `json:"reason"`
	Since  time.Time `json:"since"`
	Seen   time.Time `json:"seen"` // when an executor last found that the execution waits
	Detail string    `json:"detail"`

	Until time.Time `json:"until,omitzero"`  // with NotBefore
	Limit uint32    `json:"limit,omitempty"` // with Slot and TenantLimit
	Used  uint32    `json:"used,omitempty"`  // with TenantLimit
}

// IsSameWait reports whether two entries describe the same wait of an execution, so that the earlier Since applies to both.
func (e Entry) IsSameWait(o Entry) bool {
	return e.Execution == o.Execution && e.Reason == o.Reason && e.Holder == o.Holder && e.Attempt == o.Attempt
}

// Count converts a number of things to the type of Entry.Limit and Entry.Used. It returns 0 for a negative number, and the
// largest value for a number that is too large.
func Count(n int) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) } //nolint:gosec // bounded just here

// Errors of a Bucket.
var (
	// ErrNoBucket is returned if NATS does not have the bucket, because its streams were created by an earlier build.
	ErrNoBucket = errors.New("NATS does not have the bucket " + topology.BucketWaits)
	// ErrInvalid is returned for an entry that does not decode, or that has a reason which this build does not know.
	ErrInvalid = errors.New("the entry is not valid")
	// ErrChanged is returned by Put if another executor wrote the entry first.
	ErrChanged = errors.New("another executor wrote the entry first")
)

// A Bucket reads and writes entries in NATS. It is safe for concurrent use.
type Bucket struct {
	js jetstream.JetStream

	mu sync.Mutex
	kv jetstream.KeyValue // nil until the first use
}

// NewBucket returns a Bucket, which sends nothing to NATS before its first use.
func NewBucket(js jetstream.JetStream) *Bucket { return &Bucket{js: js} }

// open returns the key-value bucket. It keeps the handle, because getting one is a request to NATS.
func (b *Bucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kv != nil {
		return b.kv, nil
	}
	kv, err := b.js.KeyValue(ctx, topology.BucketWaits)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, ErrNoBucket
	}
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", topology.BucketWaits, err)
	}
	b.kv = kv
	return kv, nil
}

// A Stored is an entry in the bucket.
type Stored struct {
	Entry
	Revision uint64    // 0 if the execution has no entry
	Written  time.Time // clock of the streams
}

// Find returns the entry of an execution; its Revision is 0 if there is none. If the entry is not valid, Find returns an empty one
// with its revision, and an error that wraps ErrInvalid.
func (b *Bucket) Find(ctx context.Context, execution string) (Stored, error) {
	kv, err := b.open(ctx)
	if err != nil {
		return Stored{}, err
	}
	got, err := kv.Get(ctx, execution)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return Stored{}, nil
	}
	if err != nil {
		return Stored{}, fmt.Errorf("read the wait of %s: %w", execution, err)
	}
	s := Stored{Revision: got.Revision(), Written: got.Created()}
	var e Entry
	if err := json.Unmarshal(got.Value(), &e); err != nil {
		return s, fmt.Errorf("wait of %s: %w: %w", execution, ErrInvalid, err)
	}
	if _, known := Describe(e.Reason); !known || e.Execution != execution {
		return s, fmt.Errorf("wait of %s: %w: reason %.64q, execution %.64q", execution, ErrInvalid, e.Reason, e.Execution)
	}
	s.Entry = e
	return s, nil
}

// Put stores an entry in place of the one with a revision, or as the first one of its execution if the revision is 0. The error
// wraps ErrChanged if the execution has an entry with another revision. NATS removes the entry after topology.WaitTTL.
func (b *Bucket) Put(ctx context.Context, e Entry, revision uint64) error {
	kv, err := b.open(ctx)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode the wait of %s: %w", e.Execution, err)
	}
	if revision == 0 {
		_, err = kv.Create(ctx, e.Execution, raw)
	} else {
		_, err = kv.Update(ctx, e.Execution, raw, revision)
	}
	var refused *jetstream.APIError
	if errors.Is(err, jetstream.ErrKeyExists) || errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return fmt.Errorf("store the wait of %s: %w", e.Execution, ErrChanged)
	}
	if err != nil {
		return fmt.Errorf("store the wait of %s: %w", e.Execution, err)
	}
	return nil
}

// Delete deletes the entry of an execution. Without an entry it has no effect.
func (b *Bucket) Delete(ctx context.Context, execution string) error {
	kv, err := b.open(ctx)
	if err != nil {
		return err
	}
	if err := kv.Delete(ctx, execution); err != nil {
		return fmt.Errorf("delete the wait of %s: %w", execution, err)
	}
	return nil
}
