package events_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

// vector is an entry of testdata/hash_vectors.json. A verifier in another language must compute the same hashes.
type vector struct {
	Name    string        `json:"name"`
	V       int           `json:"v,omitempty"` // version of the commit; 0 means 1
	Prev    string        `json:"prev"`
	Subject vectorSubject `json:"subject"`
	ID      string        `json:"id"`
	Actor   events.Actor  `json:"actor"`
	Epoch   uint64        `json:"epoch"`
	Events  string        `json:"events"` // the stored bytes
	Hash    string        `json:"hash"`
}

type vectorSubject struct {
	Tenant string        `json:"tenant"`
	ID     string        `json:"id"`
	Aspect events.Aspect `json:"aspect"`
	NATS   string        `json:"nats"` // the form that the hash covers
}

func vectors(t *testing.T) []vector {
	t.Helper()
	b, err := os.ReadFile("testdata/hash_vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var list []vector
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	newest := slices.ContainsFunc(list, func(v vector) bool { return v.V == events.CommitVersion && v.Actor.User != "" })
	if len(list) < 8 || !newest {
		t.Fatalf("there are only %d vectors, or none of version %d", len(list), events.CommitVersion)
	}
	return list
}

func (v vector) subject() events.Subject {
	return events.Subject{Tenant: v.Subject.Tenant, ID: v.Subject.ID, Aspect: v.Subject.Aspect}
}

func TestHash_FixedVectors(t *testing.T) {
	t.Parallel()
	for _, v := range vectors(t) {
		if got := v.subject().String(); got != v.Subject.NATS {
			t.Errorf("%s: the subject is %s, want %s", v.Name, got, v.Subject.NATS)
		}
		c := events.Commit{V: v.V, ID: v.ID, Actor: v.Actor, Epoch: v.Epoch, Prev: v.Prev, Events: json.RawMessage(v.Events), State: json.RawMessage(`"not hashed"`)}
		if got := c.ComputeHash(v.subject()); got != v.Hash {
			t.Errorf("%s: the hash is %s, want %s", v.Name, got, v.Hash)
		}
		if got := independent(v); got != v.Hash {
			t.Errorf("%s: by the documented rule the hash is %s, want %s", v.Name, got, v.Hash)
		}
	}
}

// independent computes a hash from the documented rule, without the code under test: SHA-256 over the parts, each
// preceded by its length as eight bytes, big endian.
func independent(v vector) string {
	var b bytes.Buffer
	parts := []string{v.Prev, v.Subject.NATS, v.ID, v.Actor.Kind, v.Actor.ID, fmt.Sprint(v.Epoch), v.Events}
	if v.V == 2 {
		parts = []string{"2", v.Prev, v.Subject.NATS, v.ID, v.Actor.Kind, v.Actor.ID, v.Actor.Key, v.Actor.User, v.Actor.Service, v.Actor.Address, fmt.Sprint(v.Epoch), v.Events}
	}
	for _, part := range parts {
		if err := binary.Write(&b, binary.BigEndian, uint64(len(part))); err != nil {
			panic(err) // writes to a buffer do not fail
		}
		b.WriteString(part)
	}
	sum := sha256.Sum256(b.Bytes())
	return hex.EncodeToString(sum[:])
}

// TestHash_CoversEveryPart changes one part of a commit at a time, and moves text between neighbouring parts.
func TestHash_CoversEveryPart(t *testing.T) {
	t.Parallel()
	s := events.RunSubject("acme", events.DeriveID(events.KindSession, "a"))
	first := events.Commit{V: 1, ID: "cmt_a", Actor: events.Actor{Kind: "executor", ID: "x"}, Epoch: 3, Prev: "ab", Events: json.RawMessage(`[1]`)}
	second := first
	second.V, second.Actor = 2, events.Actor{Kind: "executor", ID: "x", Key: "k", User: "u", Service: "s", Address: "a"}
	changes := map[string]func(*events.Commit, *events.Subject){
		"prev":            func(c *events.Commit, _ *events.Subject) { c.Prev = "ac" },
		"tenant":          func(_ *events.Commit, s *events.Subject) { s.Tenant = "acmf" },
		"session":         func(_ *events.Commit, s *events.Subject) { s.ID = events.DeriveID(events.KindSession, "b") },
		"aspect":          func(_ *events.Commit, s *events.Subject) { s.Aspect = events.Life },
		"id":              func(c *events.Commit, _ *events.Subject) { c.ID = "cmt_b" },
		"actor kind":      func(c *events.Commit, _ *events.Subject) { c.Actor.Kind = "service" },
		"actor id":        func(c *events.Commit, _ *events.Subject) { c.Actor.ID = "y" },
		"epoch":           func(c *events.Commit, _ *events.Subject) { c.Epoch = 4 },
		"events":          func(c *events.Commit, _ *events.Subject) { c.Events = json.RawMessage(`[2]`) },
		"spacing":         func(c *events.Commit, _ *events.Subject) { c.Events = json.RawMessage(`[1 ]`) },
		"moved text":      func(c *events.Commit, _ *events.Subject) { c.Actor = events.Actor{Kind: "executorx"} },
		"moved id text":   func(c *events.Commit, _ *events.Subject) { c.ID, c.Actor.Kind = "cmt_aexecutor", "" },
		"moved the epoch": func(c *events.Commit, _ *events.Subject) { c.Actor.ID, c.Epoch = "x3", 0 },
		"version":         func(c *events.Commit, _ *events.Subject) { c.V = 3 - c.V },
	}
	for _, base := range []events.Commit{first, second} {
		if base.V == 2 {
			for name, field := range map[string]func(*events.Actor){
				"key":                   func(a *events.Actor) { a.Key = "l" },
				"user":                  func(a *events.Actor) { a.User = "v" },
				"service":               func(a *events.Actor) { a.Service = "t" },
				"address":               func(a *events.Actor) { a.Address = "b" },
				"moved text to user":    func(a *events.Actor) { a.Key, a.User = "", "ku" },
				"moved text to service": func(a *events.Actor) { a.Service, a.Address = "sa", "" },
			} {
				changes[name] = func(c *events.Commit, _ *events.Subject) { field(&c.Actor) }
			}
		}
		hash := base.ComputeHash(s)
		for name, change := range changes {
			c, sub := base, s
			change(&c, &sub)
			if c.ComputeHash(sub) == hash {
				t.Errorf("version %d, %s: the hash stays the same", base.V, name)
			}
		}
		c := base
		c.State, c.Hash = json.RawMessage(`1`), "x"
		if c.ComputeHash(s) != hash {
			t.Errorf("version %d: state or hash are hashed", base.V)
		}
	}
}

// TestVersion1_HasNoMoreThanItsHashCovers tests that a commit of version 1 is written without the fields of later
// versions. Such fields in a message of version 1 are not read, because the hash does not cover them.
func TestVersion1_HasNoMoreThanItsHashCovers(t *testing.T) {
	t.Parallel()
	s := events.LifeSubject("acme", events.DeriveID(events.KindSession, "a"))
	d := events.Draft{
		V: 1, ID: events.DeriveID(events.KindCommit, "a"), Actor: events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: "ann", Service: "session/a", Address: "192.0.2.1"},
		Events: []events.Event{{ID: "evt_a", Data: events.SessionDeleted{}}},
	}
	want := events.Actor{Kind: "key", ID: "key_1"}
	c, err := d.Seal(s, "")
	if err != nil || c.V != 1 || c.Actor != want {
		t.Fatalf("sealed as version %d by %+v, %v", c.V, c.Actor, err)
	}
	b, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	forged := bytes.Replace(b, []byte(`"id":"key_1"`), []byte(`"id":"key_1","key":"key_2","user":"eve","address":"192.0.2.2"`), 1)
	if got, err := events.DecodeCommit(forged); err != nil || got.Actor != want || got.ComputeHash(s) != c.Hash {
		t.Errorf("read as %+v, %v", got.Actor, err)
	}
	if c, err = (events.Draft{ID: d.ID, Actor: d.Actor, Events: d.Events}).Seal(s, ""); err != nil || c.V != 2 || c.Actor != d.Actor {
		t.Errorf("a draft of no version is sealed as version %d by %+v, %v", c.V, c.Actor, err)
	}
}

func TestSeal_RefusesInvalidDrafts(t *testing.T) {
	t.Parallel()
	s := events.RunSubject("acme", events.DeriveID(events.KindSession, "a"))
	ok := events.Draft{ID: events.DeriveID(events.KindCommit, "a"), Events: []events.Event{{ID: "evt_a", Data: events.SessionDeleted{}}}}
	if _, err := ok.Seal(s, ""); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*events.Draft){
		"no events":                 func(d *events.Draft) { d.Events = nil },
		"no id":                     func(d *events.Draft) { d.ID = "" },
		"a bad id":                  func(d *events.Draft) { d.ID = "cmt_>" },
		"no data":                   func(d *events.Draft) { d.Events = []events.Event{{ID: "evt_a"}} },
		"a version that is to come": func(d *events.Draft) { d.V = events.CommitVersion + 1 },
		"a long user":               func(d *events.Draft) { d.Actor.User = strings.Repeat("u", events.MaxUserBytes+1) },
		"bad state":                 func(d *events.Draft) { d.State = func() {} },
		"bad json": func(d *events.Draft) {
			d.Events = []events.Event{{Data: events.OpaquePayload{Name: "x", Raw: json.RawMessage(`{`)}}}
		},
	} {
		d := ok
		change(&d)
		if _, err := d.Seal(s, ""); err == nil {
			t.Errorf("%s was sealed", name)
		}
	}
}

func TestDecodeCommit_RefusesInvalidMessages(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "{", "[]", `{"v":3,"id":"cmt_a"}`, `{"id":"cmt_a"}`, "\x00"} {
		if _, err := events.DecodeCommit([]byte(bad)); err == nil {
			t.Errorf("%q was read as a commit", bad)
		}
	}
	if _, err := (events.Commit{V: 1, Events: json.RawMessage(`{}`)}).DecodeEvents(); err == nil {
		t.Error("an object was read as a list of events")
	}
}

func TestSplit_KeepsOrderAndLimit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 3000).Draw(t, "limit")
		sizes := rapid.SliceOfN(rapid.IntRange(0, 2000), 0, 20).Draw(t, "sizes")
		var list []events.Event
		for i, n := range sizes {
			list = append(list, events.Event{ID: fmt.Sprint(i), Data: events.Log{Message: strings.Repeat("x", n)}})
		}
		parts, err := events.SplitEvents(list, limit)
		if err != nil {
			t.Fatal(err)
		}
		var joined []events.Event
		for _, p := range parts {
			if len(p) == 0 {
				t.Fatal("a part is empty")
			}
			b, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			if len(p) > 1 && len(b)-2 > limit {
				t.Fatalf("a part of %d events has %d bytes, the limit is %d", len(p), len(b)-2, limit)
			}
			joined = append(joined, p...)
		}
		if !reflect.DeepEqual(joined, list) {
			t.Fatal("the parts are not the list")
		}
	})
}

// TestStoredSize_CountsLargeDataAsAReference tests that data above MaxInlineBytes counts with the size of the reference
// that a commit stores in its place.
func TestStoredSize_CountsLargeDataAsAReference(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, least, most int }{
		{0, 50, 300},
		{events.MaxInlineBytes - 100, events.MaxInlineBytes - 100, events.MaxInlineBytes + 300},
		{events.MaxInlineBytes + 100, 128, 512},
		{4 << 20, 128, 512},
	} {
		got, err := events.StoredSize(events.Event{ID: "e", Data: events.Log{Message: strings.Repeat("x", c.text)}})
		if err != nil || got < c.least || got > c.most {
			t.Errorf("%d bytes of text: %d, %v; want %d to %d", c.text, got, err, c.least, c.most)
		}
	}
}

// TestEncode_IsStable tests that events that are decoded and encoded again have the same bytes. The hash chain
// depends on it.
func TestEncode_IsStable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.String().Draw(t, "text")
		s := events.LifeSubject("acme", events.DeriveID(events.KindSession, "a"))
		c, err := events.Draft{
			V: rapid.IntRange(0, 2).Draw(t, "version"), ID: events.DeriveID(events.KindCommit, text),
			Actor: events.Actor{Kind: rapid.String().Draw(t, "kind"), ID: text, User: rapid.StringN(0, -1, events.MaxUserBytes).Draw(t, "user")},
			Epoch: rapid.Uint64().Draw(t, "epoch"), State: text,
			Events: []events.Event{{ID: text, Time: goldenTime, Source: events.FromServer, Data: events.MessageAccepted{Content: text}}},
		}.Seal(s, "")
		if err != nil {
			t.Fatal(err)
		}
		first, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		read, err := events.DecodeCommit(first)
		if err != nil {
			t.Fatal(err)
		}
		second, err := read.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(first, second) || read.ComputeHash(s) != c.Hash {
			t.Fatalf("%s becomes %s", first, second)
		}
	})
}

func TestPayloadRef_RecognizesReferences(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(events.PayloadRef{SHA256: "ab", Size: 3})
	if err != nil || !events.IsPayloadRef(b) {
		t.Errorf("%s is no reference: %v", b, err)
	}
	for _, no := range []string{"", "{}", `{"sha256":"ab"}`, `"$sha256"`} {
		if events.IsPayloadRef(json.RawMessage(no)) {
			t.Errorf("%s is a reference", no)
		}
	}
	// A reference in place of the data of a known type is not decoded until the data is fetched.
	if o, ok := events.DecodePayload("message_accepted", b).(events.OpaquePayload); !ok || !bytes.Equal(o.Raw, b) {
		t.Error("a reference was decoded as data")
	}
}

func FuzzDecodeCommit(f *testing.F) {
	for _, e := range events.EventTypes() {
		b, err := os.ReadFile("testdata/golden/" + string(e.Type) + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := events.DecodeCommit(b)
		if err != nil {
			return
		}
		list, err := c.DecodeEvents()
		if err != nil {
			return
		}
		for _, e := range list {
			if e.Data == nil {
				t.Fatal("an event was read without data")
			}
			if _, err := json.Marshal(e); err != nil && e.Time.Year() >= 0 && e.Time.Year() <= 9999 {
				t.Fatalf("a decoded commit cannot be encoded: %v", err)
			}
		}
	})
}

// TestEncode_KeepsEveryField tests that an encoded commit has every field of the commit.
func TestEncode_KeepsEveryField(t *testing.T) {
	t.Parallel()
	want := events.Commit{
		V: events.CommitVersion, ID: "com_1", Actor: events.Actor{Kind: "user", ID: "key_1", Key: "key_1", User: "Änne \"x\"", Service: "session/a:1", Address: "2001:db8::1"}, Epoch: 3, Prev: "ab", Hash: "cd",
		Events: json.RawMessage(`[{"a":1}]`), State: json.RawMessage(`{"v":1}`), Command: "cmd_1",
	}
	for _, v := range []reflect.Value{reflect.ValueOf(want), reflect.ValueOf(want.Actor)} {
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				t.Fatalf("the commit of this test has no %s", v.Type().Field(i).Name)
			}
		}
	}
	b, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := events.DecodeCommit(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s is read as %+v, %v; want %+v", b, got, err, want)
	}
}
