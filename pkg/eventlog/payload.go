package eventlog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// PayloadStore stores event data that is too large for the log, by its owner (a session or catalogue entry) and its
// SHA-256 in hex. Equal data of two sessions is stored twice, so that a session's data can be removed with the
// session.
type PayloadStore interface {
	// Put stores data under its owner and digest. It is idempotent.
	Put(ctx context.Context, owner events.Subject, digest string, data []byte) error
	// Get returns the data, or ErrNotFound.
	Get(ctx context.Context, owner events.Subject, digest string) ([]byte, error)
}

// SealDraft is the part of Append that all implementations of Log share. It encodes the draft as the next commit after
// head, moves large data to store, and returns the commit and its message. If it returns ErrTooLarge, it has stored
// nothing.
func SealDraft(ctx context.Context, head Head, d events.Draft, store PayloadStore) (events.Commit, []byte, error) {
	if err := head.Subject.Check(); err != nil {
		return events.Commit{}, nil, fmt.Errorf("append: %w", err)
	}
	if (head.Seq == 0) != (head.Hash == "") {
		return events.Commit{}, nil, fmt.Errorf("append to %s: head must have both a sequence and a hash or neither, but has %d and %q", head.Subject, head.Seq, head.Hash)
	}
	c, err := d.Seal(head.Subject, head.Hash)
	if err != nil {
		return events.Commit{}, nil, fmt.Errorf("append to %s: %w", head.Subject, err)
	}
	var large map[string][]byte
	if len(c.Events) > events.MaxInlineBytes {
		if d.Events, large, err = extractLargeData(d.Events); err != nil {
			return events.Commit{}, nil, fmt.Errorf("append to %s: %w", head.Subject, err)
		}
		if c, err = d.Seal(head.Subject, head.Hash); err != nil {
			return events.Commit{}, nil, fmt.Errorf("append to %s: %w", head.Subject, err)
		}
	}
	msg, err := c.Encode()
	if err != nil {
		return events.Commit{}, nil, fmt.Errorf("append to %s: encode: %w", head.Subject, err)
	}
	if len(msg) > events.MaxCommitBytes {
		return events.Commit{}, nil, fmt.Errorf("append to %s: commit %s has %d bytes, at most %d: %w", head.Subject, c.ID, len(msg), events.MaxCommitBytes, ErrTooLarge)
	}
	for digest, data := range large {
		if err := store.Put(ctx, head.Subject, digest, data); err != nil {
			return events.Commit{}, nil, fmt.Errorf("append to %s: store payload %s: %w", head.Subject, digest, err)
		}
	}
	return c, msg, nil
}

// extractLargeData replaces data over events.MaxInlineBytes by references. It returns the events, and the removed data by
// digest.
func extractLargeData(list []events.Event) ([]events.Event, map[string][]byte, error) {
	out := make([]events.Event, len(list))
	large := map[string][]byte{}
	for i, e := range list {
		out[i] = e
		data, err := e.EncodedData()
		if err != nil {
			return nil, nil, fmt.Errorf("encode %s %s: %w", e.Type(), e.ID, err)
		}
		if len(data) <= events.MaxInlineBytes {
			continue
		}
		sum := sha256.Sum256(data)
		digest := hex.EncodeToString(sum[:])
		ref, err := encodeJSON(events.PayloadRef{SHA256: digest, Size: len(data)})
		if err != nil {
			return nil, nil, err
		}
		out[i].Data = events.OpaquePayload{Name: e.Type(), Raw: ref}
		large[digest] = data
	}
	return out, large, nil
}

// OpenRecord decodes a stored message of the log into a Record, and fetches the data that the commit refers to. If it
// fails, the record still has the position of the message.
func OpenRecord(ctx context.Context, subject string, p Position, stored time.Time, msg []byte, store PayloadStore) (Record, error) {
	rec, err := DecodeRecord(subject, p, stored, msg)
	if err != nil {
		return rec, err
	}
	return ResolveEvents(ctx, rec, store)
}

// DecodeRecord decodes a stored message of the log into a Record without events; ResolveEvents adds the events. subject
// is the form that events.Subject.String returns.
func DecodeRecord(subject string, p Position, stored time.Time, msg []byte) (Record, error) {
	return DecodeNATSRecord(0, subject, p, stored, msg)
}

// DecodeNATSRecord is like DecodeRecord, but takes the NATS subject of the message, in a log with the given partitions.
func DecodeNATSRecord(partitions events.Partitioning, subject string, p Position, stored time.Time, msg []byte) (Record, error) {
	rec := Record{Position: p, Time: stored}
	var err error
	if rec.Subject, err = partitions.ParseSubject(subject); err != nil {
		return rec, fmt.Errorf("read %s: %w", p, err)
	}
	if rec.Commit, err = events.DecodeCommit(msg); err != nil {
		return rec, fmt.Errorf("read %s on %s: %w", p, subject, err)
	}
	rec.Bytes = int64(len(rec.Commit.Events))
	return rec, nil
}

// ResolveEvents returns rec with its events: it decodes the events of the commit and fetches the data that they refer
// to.
func ResolveEvents(ctx context.Context, rec Record, store PayloadStore) (Record, error) {
	var err error
	if rec.Events, err = rec.Commit.DecodeEvents(); err != nil {
		return rec, fmt.Errorf("read %s on %s: %w", rec.Position, rec.Subject, err)
	}
	for i, e := range rec.Events {
		var large int64
		rec.Events[i].Data, large, err = fetchPayload(ctx, rec.Subject, e.Data, store)
		rec.Bytes += large
		if err != nil {
			return rec, fmt.Errorf("read %s on %s: %s %s: %w", rec.Position, rec.Subject, e.Type(), e.ID, err)
		}
	}
	return rec, nil
}

// PayloadError is returned if data in the object store does not match its reference in the log.
type PayloadError struct {
	Digest string
	Reason string
}

func (e *PayloadError) Error() string { return "payload " + e.Digest + ": " + e.Reason }

// fetchPayload returns the data to which a payload refers, after it has verified the digest, and the size of the data.
// It returns a payload that is no reference unchanged.
func fetchPayload(ctx context.Context, owner events.Subject, p events.Payload, store PayloadStore) (_ events.Payload, large int64, err error) {
	o, ok := p.(events.OpaquePayload)
	if !ok || !events.IsPayloadRef(o.Raw) {
		return p, 0, nil
	}
	var ref events.PayloadRef
	if err := json.Unmarshal(o.Raw, &ref); err != nil {
		return p, 0, fmt.Errorf("decode reference to a payload: %w", err)
	}
	large = max(0, int64(ref.Size))
	data, err := store.Get(ctx, owner, ref.SHA256)
	if err != nil {
		return p, large, fmt.Errorf("payload %s: %w", ref.SHA256, err)
	}
	if sum := sha256.Sum256(data); len(data) != ref.Size || hex.EncodeToString(sum[:]) != ref.SHA256 {
		return p, large, &PayloadError{Digest: ref.SHA256, Reason: fmt.Sprintf("the object has %d bytes and does not match the digest of the %d bytes that were stored", len(data), ref.Size)}
	}
	return events.DecodePayload(o.Name, data), large, nil
}

// encodeJSON returns JSON without HTML escapes, which is the encoding of commits.
func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Match reports whether the filter selects the commits of a subject.
func (f Filter) Match(partitions events.Partitioning, s events.Subject) bool {
	if f.Subject != (events.Subject{}) {
		if s.Tenant != f.Subject.Tenant || s.ID != f.Subject.ID || f.Subject.Aspect != "" && s.Aspect != f.Subject.Aspect {
			return false
		}
	}
	return f.Partitions == nil || slices.Contains(f.Partitions, partitions.PartitionOf(s.ID))
}

// Check returns an error if the filter cannot match anything in the shard of a log.
func (f Filter) Check(partitions events.Partitioning, shard, shards int) error {
	if shard < 0 || shard >= shards {
		return fmt.Errorf("shard: %d is not one of the log's %d shards", shard, shards)
	}
	if f.Partitions != nil && len(f.Partitions) == 0 {
		return errors.New("partitions: the list is empty; use nil for all partitions")
	}
	for _, p := range f.Partitions {
		if p < 0 || p >= partitions.PartitionCount() || p%shards != shard {
			return fmt.Errorf("partition: %d is not in shard %d of %d", p, shard, shards)
		}
	}
	if f.Subject == (events.Subject{}) {
		return nil
	}
	s := f.Subject
	if s.Aspect == "" {
		s.Aspect = events.Life // covers both aspects of a session, which have equal tokens
	}
	if err := s.Check(); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	if s.Partition()%shards != shard {
		return fmt.Errorf("filter: %s is not in shard %d of %d", s.ID, shard, shards)
	}
	if f.Partitions != nil && !slices.Contains(f.Partitions, partitions.PartitionOf(s.ID)) {
		return fmt.Errorf("filter: %s is not in the partitions %v", s.ID, f.Partitions)
	}
	return nil
}
