package events

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"strconv"
)

// CommitVersion is the version of the commit's shape.
const CommitVersion = 1

// MaxCommit is the largest commit in bytes; a longer list of events is split in order.
const MaxCommit = 900_000

// MaxInline is the largest data of one event in bytes that stays in the log;
// more goes to the object store under its SHA-256.
const MaxInline = 256 << 10

// MaxCommitEvents is how many bytes of events, as they are stored, a writer puts into one
// commit. The rest of MaxCommit is for the envelope and the state.
const MaxCommitEvents = 700_000

// Actor is who caused a commit.
type Actor struct {
	Kind string `json:"kind"`         // service, executor, key, user
	ID   string `json:"id,omitempty"` // the service's name, the executor's id, the key's id
}

// Commit is one message of the log: events that become true together.
type Commit struct {
	V      int             `json:"v"`
	ID     string          `json:"id"`
	Actor  Actor           `json:"actor"`
	Epoch  uint64          `json:"epoch,omitempty"`
	Prev   string          `json:"prev"` // hash of the subject's commit before, "" for the first
	Hash   string          `json:"hash"`
	Events json.RawMessage `json:"events"`          // the stored bytes, which the hash covers
	State  json.RawMessage `json:"state,omitempty"` // the writer's fold after this commit; not hashed

	// Command is the id of the command that the commit carries out, "" where there is none and in
	// commits of builds that did not record it. The hash covers it through ID, which derives from it.
	Command string `json:"command,omitempty"`
}

// Draft is a commit before it is sealed into its subject's chain.
type Draft struct {
	ID      string
	Command string // that the commit carries out, and that ID derives from; "" for none
	Actor   Actor
	Epoch   uint64
	Events  []Event
	State   any // marshalled to JSON; nil for none
}

// Seal encodes a draft and chains it to the hash of the commit before.
func (d Draft) Seal(s Subject, prev string) (Commit, error) {
	if len(d.Events) == 0 {
		return Commit{}, fmt.Errorf("commit %s on %s has no events", d.ID, s)
	}
	if err := CheckID("commit id", KindCommit, d.ID); err != nil {
		return Commit{}, err
	}
	list, err := marshalEvents(d.Events)
	if err != nil {
		return Commit{}, fmt.Errorf("encode commit %s: %w", d.ID, err)
	}
	c := Commit{V: CommitVersion, ID: d.ID, Actor: d.Actor, Epoch: d.Epoch, Prev: prev, Events: list, Command: d.Command}
	if d.State != nil {
		if c.State, err = marshal(d.State); err != nil {
			return Commit{}, fmt.Errorf("encode state of commit %s: %w", d.ID, err)
		}
	}
	c.Hash = c.ComputeHash(s)
	return c, nil
}

// Rechain gives the commit with other stored event bytes (large data moved to
// the object store) and the hash that covers them.
func (c Commit) Rechain(s Subject, events json.RawMessage) Commit {
	c.Events = events
	c.Hash = c.ComputeHash(s)
	return c
}

// ComputeHash is the chain's hash: SHA-256 over the length-prefixed parts prev,
// subject, commit id, actor kind, actor id, epoch (decimal) and the stored
// bytes of events; in hex.
func (c Commit) ComputeHash(s Subject) string {
	h := sha256.New()
	hashParts(h, c.Prev, s.String(), c.ID, c.Actor.Kind, c.Actor.ID, strconv.FormatUint(c.Epoch, 10), string(c.Events))
	return hex.EncodeToString(h.Sum(nil))
}

// DecodeCommit reads a message of the log.
func DecodeCommit(b []byte) (Commit, error) {
	var c Commit
	if err := json.Unmarshal(b, &c); err != nil {
		return Commit{}, fmt.Errorf("decode commit: %w", err)
	}
	if c.V != CommitVersion {
		return Commit{}, fmt.Errorf("commit %s has version %d, known is %d", c.ID, c.V, CommitVersion)
	}
	return c, nil
}

// Decode gives the commit's events.
func (c Commit) Decode() ([]Event, error) {
	// Not into []Event, whose UnmarshalJSON would read each event's bytes several times more.
	var read []stored
	if err := json.Unmarshal(c.Events, &read); err != nil {
		return nil, fmt.Errorf("decode events of commit %s: %w", c.ID, err)
	}
	list := make([]Event, len(read))
	for i, s := range read {
		list[i] = Event{s.ID, s.Time, s.ExecutionID, s.ConversationID, s.Source, s.N, DecodePayload(s.Type, s.Data)}
	}
	return list, nil
}

// payloadRefSize is more than the bytes of a PayloadRef in JSON.
const payloadRefSize = 128

// StoredSize returns how many bytes of a commit an event takes. Of data over MaxInline only
// the reference is in the commit.
func StoredSize(e Event) (int, error) {
	b, err := marshal(e)
	if err != nil {
		return 0, err
	}
	if len(b) <= MaxInline {
		return len(b), nil
	}
	data, err := marshal(e.Data)
	if err != nil {
		return 0, err
	}
	if len(data) <= MaxInline {
		return len(b), nil
	}
	return len(b) - len(data) + payloadRefSize, nil
}

// Split cuts a list of events into runs that each stay under the limit of bytes as they are
// stored, in order. An event larger than the limit stands alone.
func Split(list []Event, limit int) ([][]Event, error) {
	var out [][]Event
	start, size := 0, 0
	for i, e := range list {
		n, err := StoredSize(e)
		if err != nil {
			return nil, err
		}
		if i > start && size+n > limit {
			out = append(out, list[start:i])
			start, size = i, 0
		}
		size += n + 1
	}
	if start < len(list) {
		out = append(out, list[start:])
	}
	return out, nil
}

// PayloadRef stands in place of an event's data that lies in the object store.
type PayloadRef struct {
	SHA256 string `json:"$sha256"`
	Size   int    `json:"$size"` // bytes
}

// IsPayloadRef tells whether data is a reference to the object store.
func IsPayloadRef(data json.RawMessage) bool {
	return bytes.HasPrefix(data, []byte(`{"$sha256":`))
}

// hashParts writes each part with its length before it, so that no two lists of parts look alike.
func hashParts(h hash.Hash, parts ...string) {
	var n [8]byte
	for _, p := range parts {
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
}
