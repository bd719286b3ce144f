package events

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
)

// CommitVersion is the newest version of the commit format. Version 2 added key, user, service and address to the
// actor and to the hash. All versions up to this one can be read.
const CommitVersion = 2

// The maximum lengths in bytes of the Actor fields that version 2 added.
const (
	MaxUserBytes    = 256
	maxKeyBytes     = 128
	maxServiceBytes = 320
	maxAddressBytes = 64
)

// MaxCommitBytes is the maximum size of a commit in bytes. Writers split a longer list of events into several commits,
// in order.
const MaxCommitBytes = 900_000

// MaxInlineBytes is the maximum size in bytes of an event's data inside a commit. Larger data goes to the object store,
// named by its SHA-256.
const MaxInlineBytes = 256 << 10

// MaxCommitEventBytes is the maximum total size in bytes of the stored events that a writer puts into one commit. The
// rest of MaxCommitBytes is for the envelope and the state.
const MaxCommitEventBytes = 700_000

// Actor identifies who caused a commit and which service wrote it. Commits of version 1 have only Kind and ID.
type Actor struct {
	Kind string `json:"kind"`         // service, executor, key, user
	ID   string `json:"id,omitempty"` // the service's name, the executor's id, the key's id

	Key     string `json:"key,omitempty"`     // the API key that caused the commit; "root" for the root key, "" for none
	User    string `json:"user,omitempty"`    // the application's end user, as the holder of the key stated it
	Service string `json:"service,omitempty"` // the service that wrote the commit, and its replica: session/<replica>
	Address string `json:"address,omitempty"` // the client's IP address, as the gateway saw it
}

// IsClient reports whether a client caused the commit: the holder of an API key, or any client of a gateway that
// requires no key.
func (a Actor) IsClient() bool { return a.Kind == "key" || a.Kind == "user" || a.Address != "" }

// WrittenBy returns a with Service set: the actor of a commit that service writes on behalf of a. Gateways built
// before version 2 state the key in ID alone, so Key is filled from ID.
func (a Actor) WrittenBy(service string) Actor {
	if a.Kind == "key" {
		a.Key = cmp.Or(a.Key, a.ID)
	}
	a.Service = service
	return a
}

// checkLengths returns an error for the first field of commit version 2 that is too long.
func (a Actor) checkLengths() error {
	for _, f := range []struct {
		name, value string
		most        int
	}{{"key", a.Key, maxKeyBytes}, {"user", a.User, MaxUserBytes}, {"service", a.Service, maxServiceBytes}, {"address", a.Address, maxAddressBytes}} {
		if len(f.value) > f.most {
			return fmt.Errorf("actor: %s has %d bytes, at most %d are allowed", f.name, len(f.value), f.most)
		}
	}
	return nil
}

// Commit is one message of the log: events that are appended atomically.
type Commit struct {
	V      int             `json:"v"`
	ID     string          `json:"id"`
	Actor  Actor           `json:"actor"`
	Epoch  uint64          `json:"epoch,omitempty"`
	Prev   string          `json:"prev"` // hash of the previous commit of the subject, "" for the first
	Hash   string          `json:"hash"`
	Events json.RawMessage `json:"events"`          // the stored bytes, which the hash covers
	State  json.RawMessage `json:"state,omitempty"` // the writer's folded state after this commit; not part of the hash

	// Command is the id of the command that caused the commit. It is "" if there is none and in commits of builds
	// that did not record it. The hash covers it through ID, which is derived from it.
	Command string `json:"command,omitempty"`
}

// Draft is a commit before Seal encodes it and links it to the previous commit of its subject.
type Draft struct {
	V       int // version of the commit format; 0 means CommitVersion
	ID      string
	Command string // the command that ID is derived from; "" for none
	Actor   Actor
	Epoch   uint64
	Events  []Event
	State   any // the writer's folded state, marshalled to JSON; nil for none
}

// Seal validates and encodes a draft as a commit of subject s. prev is the hash of the subject's previous commit, or ""
// for the first commit.
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
	if err := d.Actor.checkLengths(); err != nil {
		return Commit{}, fmt.Errorf("commit %s: %w", d.ID, err)
	}
	list, err := marshalEvents(d.Events)
	if err != nil {
		return Commit{}, fmt.Errorf("encode commit %s: %w", d.ID, err)
	}
	c := Commit{V: cmp.Or(d.V, CommitVersion), ID: d.ID, Actor: d.Actor, Epoch: d.Epoch, Prev: prev, Events: list, Command: d.Command}
	if c.V == 1 {
		c.Actor = c.Actor.asVersion1()
	}
	if d.State != nil {
		if c.State, err = marshalJSON(d.State); err != nil {
			return Commit{}, fmt.Errorf("encode state of commit %s: %w", d.ID, err)
		}
	}
	c.Hash = c.ComputeHash(s)
	return c, nil
}

// asVersion1 returns the actor with only the fields that commits of version 1 have.
func (a Actor) asVersion1() Actor { return Actor{Kind: a.Kind, ID: a.ID} }

// WithStoredEvents returns the commit with other stored event bytes, in which references replace large data, and with
// the hash that covers these bytes.
func (c Commit) WithStoredEvents(s Subject, events json.RawMessage) Commit {
	c.Events = events
	c.Hash = c.ComputeHash(s)
	return c
}

// ComputeHash returns the hash of the commit in hex: SHA-256 over length-prefixed parts. In version 1 the parts are
// prev, subject, commit id, actor kind, actor id, epoch (decimal) and the stored bytes of events. From version 2 on
// they are version (decimal), prev, subject, commit id, actor kind, actor id, key, user, service, address, epoch
// and events.
func (c Commit) ComputeHash(s Subject) string {
	parts := make([]byte, 0, 1024)
	epoch := strconv.FormatUint(c.Epoch, 10)
	if c.V < 2 {
		parts = appendParts(parts, c.Prev, s.String(), c.ID, c.Actor.Kind, c.Actor.ID, epoch)
	} else {
		parts = appendParts(parts, strconv.Itoa(c.V), c.Prev, s.String(), c.ID, c.Actor.Kind, c.Actor.ID, c.Actor.Key, c.Actor.User, c.Actor.Service, c.Actor.Address, epoch)
	}
	h := sha256.New()
	h.Write(binary.BigEndian.AppendUint64(parts, uint64(len(c.Events))))
	h.Write(c.Events)
	return hex.EncodeToString(h.Sum(nil))
}

// DecodeCommit decodes a message of the log. It does not verify the hash.
func DecodeCommit(b []byte) (Commit, error) {
	c, ok := decodeCompactCommit(b)
	if !ok {
		c = Commit{}
		if err := json.Unmarshal(b, &c); err != nil {
			return Commit{}, fmt.Errorf("decode commit: %w", err)
		}
	}
	if c.V < 1 || c.V > CommitVersion {
		return Commit{}, fmt.Errorf("commit %s has version %d, newest known version is %d", c.ID, c.V, CommitVersion)
	}
	if c.V == 1 {
		c.Actor = c.Actor.asVersion1() // the hash covers no other field
	}
	return c, nil
}

// DecodeEvents decodes the events of the commit.
func (c Commit) DecodeEvents() ([]Event, error) {
	if list, ok := decodeCompactEvents(c.Events); ok {
		return list, nil
	}
	// Event.UnmarshalJSON would scan each event's bytes several times; decoding into stored scans them once.
	var read []storedEvent
	if err := json.Unmarshal(c.Events, &read); err != nil {
		return nil, fmt.Errorf("decode events of commit %s: %w", c.ID, err)
	}
	list := make([]Event, len(read))
	for i, s := range read {
		list[i] = s.toEvent()
	}
	return list, nil
}

// maxPayloadRefBytes is an upper bound of the size in bytes of a PayloadRef in JSON.
const maxPayloadRefBytes = 128

// StoredSize returns how many bytes of a commit an event occupies. Data over MaxInlineBytes counts only with the size of
// its reference.
func StoredSize(e Event) (int, error) {
	f, err := e.storedForm()
	if err != nil {
		return 0, err
	}
	if size := len(f.bytes) - len(f.data()); len(f.data()) > MaxInlineBytes {
		return size + maxPayloadRefBytes, nil
	}
	return len(f.bytes), nil
}

// SplitEvents divides a list of events, in order, into chunks whose stored size is at most limit bytes. An event that is
// larger than limit gets a chunk of its own.
func SplitEvents(list []Event, limit int) ([][]Event, error) {
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

// PayloadRef replaces the data of an event in a commit; the data itself is in the object store.
type PayloadRef struct {
	SHA256 string `json:"$sha256"`
	Size   int    `json:"$size"` // bytes
}

// IsPayloadRef reports whether data is a reference to the object store.
func IsPayloadRef(data json.RawMessage) bool {
	return bytes.HasPrefix(data, []byte(`{"$sha256":`))
}

// appendParts appends the length and the bytes of each part to b, so that different lists of parts never have the same
// result.
func appendParts(b []byte, parts ...string) []byte {
	for _, p := range parts {
		b = append(binary.BigEndian.AppendUint64(b, uint64(len(p))), p...)
	}
	return b
}
