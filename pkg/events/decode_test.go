package events_test

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// sampleDelta is a piece of text as an agent writes it.
func sampleDelta() events.Delta {
	return events.Delta{
		BlockID: events.DeriveID(events.KindBlock, "a"), ExecutionID: events.DeriveID(events.KindExecution, "a"), ConversationID: events.MainConversation, Epoch: 3, Offset: 1234,
		Text: "Hello, “world” <b>\n\tand \"more\"", Time: time.Date(2025, 6, 15, 12, 30, 45, 123456789, time.UTC),
	}
}

// sampleCommit is a commit of a turn with a text of 2 KB, as a message of the log.
func sampleCommit(t testing.TB) []byte {
	t.Helper()
	at := time.Date(2025, 6, 15, 12, 30, 45, 123456789, time.UTC)
	x := events.DeriveID(events.KindExecution, "a")
	block := events.Block{
		ID: events.DeriveID(events.KindBlock, "a"), Kind: events.KindAssistantText, Status: events.StatusComplete, Time: at, ExecutionID: x,
		ConversationID: events.MainConversation, Content: strings.Repeat("A sentence of the agent.\n", 80),
	}
	event := func(n uint64, p events.Payload) events.Event {
		return events.Event{ID: events.DeriveID(events.KindEvent, "a"), Time: at, ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, N: n, Data: p}
	}
	c, err := events.Draft{
		ID: events.DeriveID(events.KindCommit, "a"), Actor: events.Actor{Kind: "executor", ID: "xtr_1", Service: "executor/xtr_1"}, Epoch: 3,
		Events: []events.Event{event(7, events.BlockComplete{Block: block}), event(8, events.MetadataUpdate{Model: "m"})},
		State:  map[string]any{"v": 1, "phase": "running", "open": []string{"a", "b"}},
	}.Seal(events.RunSubject("default", events.DeriveID(events.KindSession, "a")), strings.Repeat("ab", 32))
	if err != nil {
		t.Fatal(err)
	}
	b, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// variants returns JSON texts that differ from a valid one in ways that encoding/json accepts or refuses.
func variants(valid string) []string {
	list := []string{valid, valid + " ", valid + "x", " " + valid, valid[:len(valid)-1], strings.Replace(valid, `"`, "\"\xff", 3), strings.ToUpper(valid), "null", "{}", "[]", ""}
	for _, r := range [][2]string{
		{`":`, `" : `}, {`,"`, `,"x":[{"a":1e400}],"`}, {`"epoch":3`, `"epoch":18446744073709551616`}, {`"epoch":3`, `"epoch":3.0`}, {`"epoch":3`, `"epoch":03`},
		{`"epoch":3`, `"Epoch":3`}, {`"epoch":3`, `"epoch":3,"epoch":4`}, {`"offset":1234`, `"offset":4294967296`}, {`"offset":1234`, `"offset":-1`}, {`"offset":1234`, `"offset":null`},
		{`2025`, `\u0032025`}, {`45.123456789Z`, `45.123456789+01:00`}, {`45.123456789Z`, `61Z`}, {`Hello`, `\ud83d\ude00\ud83d`}, {`Hello`, `\q`}, {`"main"`, `null`}, {`"main"`, `7`},
		{`"data":{`, `"data":{"a":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `,`},
	} {
		list = append(list, strings.Replace(valid, r[0], r[1], 1))
	}
	return list
}

func TestDelta_IsEncodedAsEncodingJSONDoes(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*events.Delta){
		func(*events.Delta) {}, func(d *events.Delta) { *d = events.Delta{} }, func(d *events.Delta) { d.Text = "\xff\u2028\x00" },
		func(d *events.Delta) { d.Time = d.Time.In(time.FixedZone("", 5400)) }, func(d *events.Delta) { d.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
	} {
		d := sampleDelta()
		change(&d)
		var want bytes.Buffer
		enc := json.NewEncoder(&want)
		enc.SetEscapeHTML(false)
		wantErr := enc.Encode(d)
		got, err := d.Encode()
		if string(got) != strings.TrimSuffix(want.String(), "\n") || (err == nil) != (wantErr == nil) {
			t.Errorf("%+v is written as %s, %v; want %s, %v", d, got, err, want.Bytes(), wantErr)
		}
	}
}

func FuzzDecodeDelta(f *testing.F) {
	b, err := sampleDelta().Encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, v := range variants(string(b)) {
		f.Add([]byte(v))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var want events.Delta
		wantErr := json.Unmarshal(b, &want)
		got, err := events.DecodeDelta(b)
		if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(got, want) {
			t.Errorf("%q is read as %+v, %v; want %+v, %v", b, got, err, want, wantErr)
		}
	})
}

// decodeEvents decodes the events of a commit with encoding/json.
func decodeEvents(raw json.RawMessage) ([]events.Event, error) {
	var stored []struct {
		ID             string          `json:"id"`
		Type           events.Type     `json:"type"`
		Time           time.Time       `json:"time"`
		ExecutionID    string          `json:"executionId"`
		ConversationID string          `json:"conversationId"`
		Source         events.Source   `json:"source"`
		N              uint64          `json:"n"`
		Data           json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(raw, &stored); err != nil {
		return nil, err
	}
	list := make([]events.Event, len(stored))
	for i, s := range stored {
		list[i] = events.Event{
			ID: s.ID, Time: s.Time, ExecutionID: s.ExecutionID, ConversationID: s.ConversationID, Source: s.Source, N: s.N, Data: events.DecodePayload(s.Type, s.Data),
		}
	}
	return list, nil
}

// FuzzDecodeCommitLikeEncodingJSON compares a commit and its events with those that encoding/json decodes.
func FuzzDecodeCommitLikeEncodingJSON(f *testing.F) {
	for _, e := range events.EventTypes() {
		b, err := os.ReadFile("testdata/golden/" + string(e.Type) + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.TrimSuffix(b, []byte("\n")))
	}
	for _, v := range variants(string(sampleCommit(f))) {
		f.Add([]byte(v))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var want events.Commit
		wantErr := json.Unmarshal(b, &want)
		got, err := events.DecodeCommit(b)
		if wantErr != nil {
			if err == nil {
				t.Fatalf("%q is read as %+v, want the error %v", b, got, wantErr)
			}
			return
		}
		if want.V < 1 || want.V > events.CommitVersion {
			return
		}
		if want.V == 1 {
			want.Actor = events.Actor{Kind: want.Actor.Kind, ID: want.Actor.ID}
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%q is read as %+v, %v; want %+v", b, got, err, want)
		}
		wantList, wantErr := decodeEvents(want.Events)
		list, err := got.DecodeEvents()
		if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(list, wantList) {
			t.Fatalf("the events of %q are read as %+v, %v; want %+v, %v", b, list, err, wantList, wantErr)
		}
	})
}

// TestDecode_UsesNoReflection tests that what this build writes is not decoded by encoding/json, which allocates more.
func TestDecode_UsesNoReflection(t *testing.T) {
	b, err := sampleDelta().Encode()
	if err != nil {
		t.Fatal(err)
	}
	commit := sampleCommit(t)
	for _, c := range []struct {
		name string
		most float64
		run  func() error
	}{
		{"encode a delta", 1, func() error { _, err := sampleDelta().Encode(); return err }},
		{"decode a delta", 5, func() error { _, err := events.DecodeDelta(b); return err }},
		{"decode a commit", 9, func() error { _, err := events.DecodeCommit(commit); return err }},
	} {
		base := 0.0
		if c.name == "encode a delta" {
			base = testing.AllocsPerRun(100, func() { sampleDelta() })
		}
		if n := testing.AllocsPerRun(100, func() { err = c.run() }) - base; n > c.most || err != nil {
			t.Errorf("%s: %v allocations, at most %v are allowed; error %v", c.name, n, c.most, err)
		}
	}
}

func BenchmarkEncodeDelta(b *testing.B) {
	d := sampleDelta()
	b.Run("encoding/json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := json.Marshal(d); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := d.Encode(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecodeDelta(b *testing.B) {
	raw, err := sampleDelta().Encode()
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encoding/json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var d events.Delta
			if err := json.Unmarshal(raw, &d); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("DecodeDelta", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := events.DecodeDelta(raw); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecodeCommit(b *testing.B) {
	raw := sampleCommit(b)
	b.Run("encoding/json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var c events.Commit
			if err := json.Unmarshal(raw, &c); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("DecodeCommit", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := events.DecodeCommit(raw); err != nil {
				b.Fatal(err)
			}
		}
	})
}
