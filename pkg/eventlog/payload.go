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

// Payloads keeps event data that is too large for the log, by the session or
// catalogue entry that it belongs to and its SHA-256 in hex. Equal data of two
// sessions is stored twice, so that a session's data can be removed with it.
type Payloads interface {
	// Put stores data under its owner and digest; storing it again changes nothing.
	Put(ctx context.Context, owner events.Subject, digest string, data []byte) error
	// Get reads it back; ErrNotFound if it is not there.
	Get(ctx context.Context, owner events.Subject, digest string) ([]byte, error)
}

// Seal is the part of Append that all adapters share: it chains the draft to
// the head, moves large data to store, and gives the commit with its message.
// It fails with ErrTooLarge, and then has stored nothing.
func Seal(ctx context.Context, head Head, d events.Draft, store Payloads) (events.Commit, []byte, error) {
	if err := head.Subject.Check(); err != nil {
		return events.Commit{}, nil, fmt.Errorf("append: %w", err)
	}
	if (head.Seq == 0) != (head.Hash == "") {
		return events.Commit{}, nil, fmt.Errorf("append to %s: a head has a sequence and a hash, or neither, not %d and %q", head.Subject, head.Seq, head.Hash)
	}
	c, err := d.Seal(head.Subject, head.Hash)
	if err != nil {
		return events.Commit{}, nil, fmt.Errorf("append to %s: %w", head.Subject, err)
	}
	var large map[string][]byte
	if len(c.Events) > events.MaxInline {
		if d.Events, large, err = claim(d.Events); err != nil {
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
	if len(msg) > events.MaxCommit {
		return events.Commit{}, nil, fmt.Errorf("append to %s: commit %s has %d bytes, at most %d: %w", head.Subject, c.ID, len(msg), events.MaxCommit, ErrTooLarge)
	}
	for digest, data := range large {
		if err := store.Put(ctx, head.Subject, digest, data); err != nil {
			return events.Commit{}, nil, fmt.Errorf("append to %s: store payload %s: %w", head.Subject, digest, err)
		}
	}
	return c, msg, nil
}

// claim puts references in place of data over events.MaxInline; the data comes back by digest.
func claim(list []events.Event) ([]events.Event, map[string][]byte, error) {
	out := make([]events.Event, len(list))
	large := map[string][]byte{}
	for i, e := range list {
		out[i] = e
		data, err := encode(e.Data)
		if err != nil {
			return nil, nil, fmt.Errorf("encode %s %s: %w", e.Type(), e.ID, err)
		}
		if len(data) <= events.MaxInline {
			continue
		}
		sum := sha256.Sum256(data)
		digest := hex.EncodeToString(sum[:])
		ref, err := encode(events.PayloadRef{SHA256: digest, Size: len(data)})
		if err != nil {
			return nil, nil, err
		}
		out[i].Data = events.Opaque{Name: e.Type(), Raw: ref}
		large[digest] = data
	}
	return out, large, nil
}

// Open reads a stored message and fetches what it refers to. Even when it fails
// the record says where the message lies.
func Open(ctx context.Context, subject string, p Position, stored time.Time, msg []byte, store Payloads) (Record, error) {
	rec, err := Decode(subject, p, stored, msg)
	if err != nil {
		return rec, err
	}
	return Resolve(ctx, rec, store)
}

// Decode is the first half of Open: the record has its commit, and no events yet.
func Decode(subject string, p Position, stored time.Time, msg []byte) (Record, error) {
	rec := Record{Position: p, Time: stored}
	var err error
	if rec.Subject, err = events.ParseSubject(subject); err != nil {
		return rec, fmt.Errorf("read %s: %w", p, err)
	}
	if rec.Commit, err = events.DecodeCommit(msg); err != nil {
		return rec, fmt.Errorf("read %s on %s: %w", p, subject, err)
	}
	rec.Bytes = int64(len(rec.Commit.Events))
	return rec, nil
}

// Resolve is the other half: it decodes the events of a record's commit and fetches what they refer to.
func Resolve(ctx context.Context, rec Record, store Payloads) (Record, error) {
	var err error
	if rec.Events, err = rec.Commit.Decode(); err != nil {
		return rec, fmt.Errorf("read %s on %s: %w", rec.Position, rec.Subject, err)
	}
	for i, e := range rec.Events {
		var large int64
		rec.Events[i].Data, large, err = fetch(ctx, rec.Subject, e.Data, store)
		rec.Bytes += large
		if err != nil {
			return rec, fmt.Errorf("read %s on %s: %s %s: %w", rec.Position, rec.Subject, e.Type(), e.ID, err)
		}
	}
	return rec, nil
}

// PayloadError is data in the object store that is not what the log refers to.
type PayloadError struct {
	Digest string
	Reason string
}

func (e *PayloadError) Error() string { return "payload " + e.Digest + ": " + e.Reason }

// fetch returns the data that a reference stands for, checked, and its length, or what it was given.
func fetch(ctx context.Context, owner events.Subject, p events.Payload, store Payloads) (_ events.Payload, large int64, err error) {
	o, ok := p.(events.Opaque)
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
		return p, large, &PayloadError{Digest: ref.SHA256, Reason: fmt.Sprintf("%d bytes are stored that do not have this digest; %d were", len(data), ref.Size)}
	}
	return events.DecodePayload(o.Name, data), large, nil
}

// encode is JSON without HTML escapes, as commits are written.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Match tells whether the filter lets a subject through.
func (f Filter) Match(s events.Subject) bool {
	if f.Subject != (events.Subject{}) {
		if s.Tenant != f.Subject.Tenant || s.ID != f.Subject.ID || f.Subject.Aspect != "" && s.Aspect != f.Subject.Aspect {
			return false
		}
	}
	return f.Partitions == nil || slices.Contains(f.Partitions, s.Partition())
}

// Check reports an error unless the filter can be applied to the shard.
func (f Filter) Check(shard, shards int) error {
	if shard < 0 || shard >= shards {
		return fmt.Errorf("shard: %d is not one of the log's %d", shard, shards)
	}
	if f.Partitions != nil && len(f.Partitions) == 0 {
		return errors.New("partitions: the list is empty; nil stands for all of them")
	}
	for _, p := range f.Partitions {
		if p < 0 || p >= events.Partitions || p%shards != shard {
			return fmt.Errorf("partition: %d does not lie in shard %d of %d", p, shard, shards)
		}
	}
	if f.Subject == (events.Subject{}) {
		return nil
	}
	s := f.Subject
	if s.Aspect == "" {
		s.Aspect = events.Life // both aspects of a session: any of them checks its tokens
	}
	if err := s.Check(); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	if s.Partition()%shards != shard {
		return fmt.Errorf("filter: %s does not lie in shard %d of %d", s.ID, shard, shards)
	}
	if f.Partitions != nil && !slices.Contains(f.Partitions, s.Partition()) {
		return fmt.Errorf("filter: %s does not lie in the partitions %v", s.ID, f.Partitions)
	}
	return nil
}
