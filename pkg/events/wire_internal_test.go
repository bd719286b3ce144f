package events

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// anyText generates text with all kinds of escapes and bytes that are not UTF-8.
func anyText() *rapid.Generator[string] {
	return rapid.OneOf(rapid.String(), rapid.StringN(0, 5, 5), rapid.Just("a<&>\\\"\u2028\u2029\x00\x1f\x7f\b\f\n\r\té😀"),
		rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
}

// anyTime generates times in several zones, some of which JSON cannot express.
func anyTime() *rapid.Generator[time.Time] {
	return rapid.Custom(func(t *rapid.T) time.Time {
		at := time.Unix(rapid.Int64Range(-1<<36, 1<<38).Draw(t, "s"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns")).UTC()
		return at.In(time.FixedZone("", rapid.SampledFrom([]int{0, 3600, -5400, 90_000, 30}).Draw(t, "zone")))
	})
}

func anyDelta() *rapid.Generator[Delta] {
	return rapid.Custom(func(t *rapid.T) Delta {
		text := anyText()
		return Delta{
			BlockID: text.Draw(t, "block"), ExecutionID: text.Draw(t, "execution"), ConversationID: text.Draw(t, "conversation"),
			Epoch: rapid.Uint64().Draw(t, "epoch"), Offset: rapid.Uint32().Draw(t, "offset"), Text: text.Draw(t, "text"), Time: anyTime().Draw(t, "time"),
		}
	})
}

// requireSameJSON compares an encoding with that of encoding/json without HTML escapes.
func requireSameJSON(t *rapid.T, got []byte, err error, value any) {
	want, wantErr := marshalJSON(value)
	if (err == nil) != (wantErr == nil) {
		t.Fatalf("error %v, want %v", err, wantErr)
	}
	if err == nil && !bytes.Equal(got, want) {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
}

func TestWireAppendJSON_EqualsEncodingJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := anyText()
		w := WireEvent{
			Seq: rapid.Uint32().Draw(t, "seq"), Position: text.Draw(t, "position"), ID: text.Draw(t, "id"), Type: Type(text.Draw(t, "type")),
			Time: anyTime().Draw(t, "time"), SessionID: text.Draw(t, "session"), ExecutionID: text.Draw(t, "execution"),
			ConversationID: text.Draw(t, "conversation"), Source: Source(text.Draw(t, "source")),
			Data: rapid.SampledFrom([]json.RawMessage{nil, json.RawMessage(`{"a":"<&>","b":[1.50,null],"a":1152921504606846976}`)}).Draw(t, "data"),
		}
		got, err := w.AppendJSON(nil)
		requireSameJSON(t, got, err, w)
		var want WireEvent
		if err != nil || json.Unmarshal(got, &want) != nil {
			return
		}
		read, ok := decodeCompactWireEvent(got)
		if !ok || !sameWire(read, want) {
			t.Fatalf("%s: decoded %+v, %v, want %+v", got, read, ok, want)
		}
	})
}

func sameWire(a, b WireEvent) bool {
	sameRest := bytes.Equal(a.Data, b.Data) && a.Time.Equal(b.Time) && a.Time.String() == b.Time.String()
	a.Data, b.Data, a.Time, b.Time = nil, nil, time.Time{}, time.Time{}
	return sameRest && a.Seq == b.Seq && a.Position == b.Position && a.ID == b.ID && a.Type == b.Type && a.SessionID == b.SessionID &&
		a.ExecutionID == b.ExecutionID && a.ConversationID == b.ConversationID && a.Source == b.Source
}

// FuzzDecodeWire compares DecodeWireEvent with json.Unmarshal.
func FuzzDecodeWire(f *testing.F) {
	const head = `{"seq":1,"position":"0-1","id":"evt_1","type":"log","time":"2026-01-02T03:04:05Z","sessionId":"s","executionId":"e","conversationId":"main","source":"server","data":`
	for _, seed := range []string{
		head + `{"a":1}}`, head + `null}`, head + `{"a":1},"seq":2}`, head + ` {}}`, head + `{}`, head + `{}} `, head + `1}}`, head + `}`,
		`{"seq":01,"position":"","type":"","time":"2026-01-02T03:04:05Z","sessionId":"","source":"","data":""}`,
		`{"SEQ":1,"data":{}}`, `null`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var want WireEvent
		wantErr := json.Unmarshal(raw, &want)
		got, err := DecodeWireEvent(raw)
		if (err == nil) != (wantErr == nil) || err == nil && !sameWire(got, want) {
			t.Fatalf("got %+v, %v, want %+v, %v", got, err, want, wantErr)
		}
	})
}

func TestDeltaAppendWire_EqualsToWire(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d, session, seq, position := anyDelta().Draw(t, "delta"), anyText().Draw(t, "session"), rapid.Uint32().Draw(t, "seq"), anyText().Draw(t, "position")
		got, err := d.AppendWire([]byte("before"), session, seq, position)
		w, wireErr := d.ToWire(session, seq, position)
		if wireErr != nil {
			t.Fatal(wireErr)
		}
		requireSameJSON(t, bytes.TrimPrefix(got, []byte("before")), err, w)
	})
}

// TestDecodeDelta_ReadsWhatServicesWriteWithoutEncodingJSON tests that the usual form takes the short way, with HTML
// escapes, as executors write it, and without.
func TestDecodeDelta_ReadsWhatServicesWriteWithoutEncodingJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := anyDelta().Draw(t, "delta")
		d.Time = d.Time.UTC()
		escaped, err := json.Marshal(d)
		if err != nil {
			return // the year has more than four digits
		}
		plain, err := d.AppendJSON(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range [][]byte{escaped, plain} {
			var want Delta
			if err := json.Unmarshal(data, &want); err != nil {
				t.Fatal(err)
			}
			if got, ok := decodeCompactDelta(data); !ok || got != want {
				t.Fatalf("%s: got %+v, %v, want %+v", data, got, ok, want)
			}
		}
	})
}

// BenchmarkWire compares the hand-written encoding and decoding of a delta and of an event with encoding/json.
func BenchmarkWire(b *testing.B) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	d := Delta{
		BlockID: "blk_01JZZZZZZZZZZZZZZZZZZZZZZZ", ExecutionID: "exe_01JZZZZZZZZZZZZZZZZZZZZZZZ", ConversationID: "main", Epoch: 1, Offset: 100,
		Text: "about \"thirty\" characters\nof text", Time: at,
	}
	const session, position = "ses_01JZZZZZZZZZZZZZZZZZZZZZZZ", "0-123456"
	delta, err := d.AppendJSON(nil)
	if err != nil {
		b.Fatal(err)
	}
	event, err := WireEvent{7, position, "evt_01JZZZZZZZZZZZZZZZZZZZZZZZ", "tool_call_requested", at, session, d.ExecutionID, "main", FromRunner,
		json.RawMessage(`{"toolUseId":"blk_01JZZZZZZZZZZZZZZZZZZZZZZZ","name":"shell","input":{"command":"ls -l","timeout":30}}`)}.AppendJSON(nil)
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"encode a text delta for clients/by hand", func() error { _, err := d.AppendWire(make([]byte, 0, 512), session, 7, position); return err }},
		{"encode a text delta for clients/encoding json", func() error {
			w, err := d.ToWire(session, 7, position)
			if err == nil {
				_, err = marshalJSON(w)
			}
			return err
		}},
		{"encode a delta/by hand", func() error { _, err := d.AppendJSON(make([]byte, 0, 512)); return err }},
		{"encode a delta/encoding json", func() error { _, err := marshalJSON(d); return err }},
		{"decode a delta/by hand", func() error { _, err := DecodeDelta(delta); return err }},
		{"decode a delta/encoding json", func() error { var d Delta; return json.Unmarshal(delta, &d) }},
		{"decode an event/by hand", func() error { _, err := DecodeWireEvent(event); return err }},
		{"decode an event/encoding json", func() error { var w WireEvent; return json.Unmarshal(event, &w) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.do(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
