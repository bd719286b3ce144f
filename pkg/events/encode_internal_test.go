package events

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// countedPayload counts how often it is encoded.
type countedPayload struct {
	OpaquePayload
	encoded *int
}

func (p countedPayload) MarshalJSON() ([]byte, error) {
	*p.encoded++
	return []byte(`{"n":"<é>"}`), nil
}

// TestEncoded_IsEncodedOnce tests that the size, the split, the commit and MarshalJSON use one encoding, and that the
// bytes and the hash of the commit are those of an event that was not encoded before.
func TestEncoded_IsEncodedOnce(t *testing.T) {
	t.Parallel()
	n := 0
	plain := Event{ID: "evt_1", Time: time.Unix(1, 2), ExecutionID: "exe_1", ConversationID: "main", Source: FromRunner, N: 7, Data: countedPayload{OpaquePayload{Name: "counted"}, &n}}
	s := RunSubject("default", DeriveID(KindSession, "a"))
	seal := func(e Event) Commit {
		t.Helper()
		c, err := Draft{ID: DeriveID(KindCommit, "a"), Events: []Event{e}}.Seal(s, "")
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	want := seal(plain)
	n = 0
	e, size, err := plain.Encoded()
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := e.Encoded()
	if err != nil {
		t.Fatal(err)
	}
	stored, err := StoredSize(again)
	if err != nil {
		t.Fatal(err)
	}
	if parts, err := SplitEvents([]Event{again}, 10); err != nil || len(parts) != 1 {
		t.Fatal(parts, err)
	}
	data, err := again.EncodedData()
	if err != nil {
		t.Fatal(err)
	}
	got := seal(again)
	raw, err := again.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	if n != 1 {
		t.Errorf("the event was encoded %d times", n)
	}
	if !bytes.Equal(got.Events, want.Events) || got.Hash != want.Hash || string(want.Events) != "["+string(raw)+"]" {
		t.Errorf("stored as %s, want %s", got.Events, want.Events)
	}
	if size != len(raw) || stored != size || string(data) != `{"n":"<é>"}` {
		t.Errorf("size %d, stored %d, data %s; the event is %s", size, stored, data, raw)
	}
	raw[0] = '!'
	if second, err := again.MarshalJSON(); err != nil || second[0] != '{' {
		t.Errorf("a change of the result changed the encoding: %s, %v", second, err)
	}
}

// TestEncoded_NoticesEveryChange tests that an event that was changed after it was encoded is encoded again.
func TestEncoded_NoticesEveryChange(t *testing.T) {
	t.Parallel()
	at := time.Unix(1, 2).UTC()
	base := Event{ID: "evt_1", Time: at, ExecutionID: "exe_1", ConversationID: "main", Source: FromRunner, N: 7, Data: Log{Message: "a", Level: "info"}}
	e, _, err := base.Encoded()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Event){
		"nothing":      func(*Event) {},
		"id":           func(e *Event) { e.ID = "evt_2" },
		"time":         func(e *Event) { e.Time = at.Add(1) },
		"zone":         func(e *Event) { e.Time = at.In(time.FixedZone("x", 3600)) },
		"execution":    func(e *Event) { e.ExecutionID = "" },
		"conversation": func(e *Event) { e.ConversationID = "b" },
		"source":       func(e *Event) { e.Source = FromServer },
		"n":            func(e *Event) { e.N = 8 },
		"data":         func(e *Event) { e.Data = Log{Message: "b", Level: "info"} },
		"equal data":   func(e *Event) { e.Data = Log{Message: "a", Level: "info"} },
		"type":         func(e *Event) { e.Data = Error{Code: "X"} },
		"a reference": func(e *Event) {
			e.Data = OpaquePayload{Name: e.Type(), Raw: json.RawMessage(`{"$sha256":"ab","$size":1}`)}
		},
		"large data":    func(e *Event) { e.Data = Log{Message: strings.Repeat("x", MaxInlineBytes+1)} },
		"empty payload": func(e *Event) { e.Data = ExecutionQueued{} },
	} {
		changed := e
		change(&changed)
		fresh := changed
		fresh.stored = nil
		got, err := changed.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		want, err := fresh.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: encoded as %s, want %s", name, got, want)
		}
		if a, err := StoredSize(changed); err != nil || a > len(want) {
			t.Errorf("%s: size %d, %v, of %d", name, a, err, len(want))
		}
	}
	none := e
	none.Data = nil
	if _, err := none.MarshalJSON(); err == nil {
		t.Error("an event without data was encoded")
	}
	p := &Log{Message: "first"}
	pointed, _, err := Event{ID: "e", Time: at, Data: p}.Encoded()
	if err != nil {
		t.Fatal(err)
	}
	p.Message = "second"
	if b, err := pointed.MarshalJSON(); err != nil || !bytes.Contains(b, []byte(`second`)) {
		t.Errorf("after a change behind a pointer: %s, %v", b, err)
	}
}
