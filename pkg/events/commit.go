package events

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"strconv"
)

// CommitVersion is the newest version of the commit's shape. Version 2 added to the actor key, user, service and address, and the hash
// covers them. Every version up to this one is read.
const CommitVersion = 2

// The most bytes of the fields of an Actor that version 2 added.
const (
	MaxUser    = 256
	maxKey     = 128
	maxService = 320
	maxAddress = 64
)

// MaxCommit is the largest commit in bytes; a longer list of events is split in order.
const MaxCommit = 900_000

// MaxInline is the largest data of one event in bytes that stays in the log;
// more goes to the object store under its SHA-256.
const MaxInline = 256 << 10

// MaxCommitEvents is how many bytes of events, as they are stored, a writer puts into one
// commit. The rest of MaxCommit is for the envelope and the state.
const MaxCommitEvents = 700_000

// Actor is who caused a commit, and who wrote it. Commits of version 1 have Kind and ID alone.
type Actor struct {
	Kind string `json:"kind"`         // service, executor, key, user
	ID   string `json:"id,omitempty"` // the service's name, the executor's id, the key's id

	Key     string `json:"key,omitempty"`     // the API key that caused the commit; "root" for the root key, "" for none
	User    string `json:"user,omitempty"`    // the application's end user, as the holder of the key stated it
	Service string `json:"service,omitempty"` // the service that wrote the commit, and its copy: session/<copy>
	Address string `json:"address,omitempty"` // the client's IP address, as the gateway saw it
}

// IsClient reports whether a client caused the commit: the holder of a key, or anybody where no key is needed.
func (a Actor) IsClient() bool { return a.Kind == "key" || a.Kind == "user" || a.Address != "" }

// WrittenBy returns the actor of a commit that a service writes for a. Gateways of builds before version 2 name a key in ID alone.
func (a Actor) WrittenBy(service string) Actor {
	if a.Kind == "key" {
		a.Key = cmp.Or(a.Key, a.ID)
	}
	a.Service = service
	return a
}

// check reports the first field of version 2 that is too long.
func (a Actor) check() error {
	for _, f := range []struct {
		name, value string
		most        int
	}{{"key", a.Key, maxKey}, {"user", a.User, MaxUser}, {"service", a.Service, maxService}, {"address", a.Address, maxAddress}} {
		if len(f.value) > f.most {
			return fmt.Errorf("actor: %s has %d bytes, at most %d are taken", f.name, len(f.value), f.most)
		}
	}
	return nil
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
	V       int // version of the commit's shape; 0 means CommitVersion
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
	if d.V < 0 || d.V > CommitVersion {
		return Commit{}, fmt.Errorf("commit %s: version %d is not between 1 and %d", d.ID, d.V, CommitVersion)
	}
	if err := d.Actor.check(); err != nil {
		return Commit{}, fmt.Errorf("commit %s: %w", d.ID, err)
	}
	list, err := marshalEvents(d.Events)
	if err != nil {
		return Commit{}, fmt.Errorf("encode commit %s: %w", d.ID, err)
	}
	c := Commit{V: cmp.Or(d.V, CommitVersion), ID: d.ID, Actor: d.Actor, Epoch: d.Epoch, Prev: prev, Events: list, Command: d.Command}
	if c.V == 1 {
		c.Actor = c.Actor.version1()
	}
	if d.State != nil {
		if c.State, err = marshal(d.State); err != nil {
			return Commit{}, fmt.Errorf("encode state of commit %s: %w", d.ID, err)
		}
	}
	c.Hash = c.ComputeHash(s)
	return c, nil
}

// version1 is the actor as a commit of version 1 has it.
func (a Actor) version1() Actor { return Actor{Kind: a.Kind, ID: a.ID} }

// Rechain gives the commit with other stored event bytes (large data moved to
// the object store) and the hash that covers them.
func (c Commit) Rechain(s Subject, events json.RawMessage) Commit {
	c.Events = events
	c.Hash = c.ComputeHash(s)
	return c
}

// ComputeHash is the chain's hash in hex: SHA-256 over length-prefixed parts. Of version 1 they are prev, subject, commit id, actor kind,
// actor id, epoch (decimal) and the stored bytes of events. From version 2 on they are the version (decimal), prev, subject, commit id,
// actor kind, actor id, key, user, service, address, epoch and events.
func (c Commit) ComputeHash(s Subject) string {
	h := sha256.New()
	epoch := strconv.FormatUint(c.Epoch, 10)
	if c.V < 2 {
		hashParts(h, c.Prev, s.String(), c.ID, c.Actor.Kind, c.Actor.ID, epoch, string(c.Events))
	} else {
		hashParts(h, strconv.Itoa(c.V), c.Prev, s.String(), c.ID, c.Actor.Kind, c.Actor.ID, c.Actor.Key, c.Actor.User, c.Actor.Service, c.Actor.Address, epoch, string(c.Events))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// DecodeCommit reads a message of the log.
func DecodeCommit(b []byte) (Commit, error) {
	var c Commit
	if err := json.Unmarshal(b, &c); err != nil {
		return Commit{}, fmt.Errorf("decode commit: %w", err)
	}
	if c.V < 1 || c.V > CommitVersion {
		return Commit{}, fmt.Errorf("commit %s has version %d, known is %d", c.ID, c.V, CommitVersion)
	}
	if c.V == 1 {
		c.Actor = c.Actor.version1() // the hash covers no more
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
