package runner_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// textLine is a journal line with a piece of text, as the runner writes it.
func textLine(t testing.TB) []byte {
	t.Helper()
	data, err := json.Marshal(runner.TextDelta{BlockID: "b1", Offset: 1234, Delta: "Hello, “world” <b>\n\tand \"more\""})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(runner.Message{Line: &runner.JournalLine{
		N: 17, Type: events.TextDelta, Time: time.Date(2025, 6, 15, 12, 30, 45, 123456789, time.UTC),
		ExecutionID: events.DeriveID(events.KindExecution, "a"), ConversationID: events.MainConversation, Data: data,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func FuzzDecodeMessage(f *testing.F) {
	line := string(textLine(f))
	f.Add([]byte(line))
	for _, r := range [][2]string{
		{`}}}`, `}}`}, {`}}}`, `}}}x`}, {`}}}`, `}} }`}, {`}}}`, `}},"reply":{"id":1}}`}, {`}}}`, `}},"line":null}`}, {`"line"`, `"Line"`}, {`"n":17`, `"n":17,"n":18`}, {`"n":17`, `"N":17`},
		{`"n":17`, `"n":1e3`}, {`"n":17`, `"n":99999999999999999999`}, {`"n":17`, `"n":-1`}, {`"offset":1234`, `"offset":4294967296`}, {`"offset":1234`, `"offset":"1"`}, {`Hello`, `\ud83d\ude00\ud83d`},
		{`Hello`, "\xff\xc3"}, {`Hello`, "\x01"}, {`Hello`, `\x`}, {`2025`, `12025`}, {`"data":`, `"data":null,"data":`}, {`"data":`, `"data" :`}, {`"b1"`, `{"a":[1.50,true,null]}`},
		{`"b1"`, strings.Repeat("[", 200) + strings.Repeat("]", 200)}, {`,"conversationId":"main"`, ``}, {`"main"`, `null`}, {`"text_delta"`, `"log"`},
	} {
		f.Add([]byte(strings.Replace(line, r[0], r[1], 1)))
	}
	f.Add([]byte(`{"hello":{"protocol":1,"journal":"jnl_1","first":1,"last":0,"status":{"memoryBytes":1,"diskBytes":2}}}`))
	f.Add([]byte(`{"reply":{"id":3,"error":{"code":"BUSY","message":"x"}}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var want runner.Message
		wantErr := json.Unmarshal(raw, &want)
		got, err := runner.DecodeMessage(raw)
		if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("%q is read as %+v, %v; want %+v, %v", raw, got, err, want, wantErr)
		}
		data := raw
		if err == nil && got.Line != nil {
			data = got.Line.Data
		}
		var wantDelta runner.TextDelta
		wantErr = json.Unmarshal(data, &wantDelta)
		delta, err := runner.DecodeDelta(data)
		if (err == nil) != (wantErr == nil) || err == nil && delta != wantDelta {
			t.Fatalf("%q is read as %+v, %v; want %+v, %v", data, delta, err, wantDelta, wantErr)
		}
	})
}

// TestDecodeMessage_UsesNoReflection tests that a line of text is not decoded by encoding/json, which allocates more.
func TestDecodeMessage_UsesNoReflection(t *testing.T) {
	raw := textLine(t)
	n := testing.AllocsPerRun(100, func() {
		m, err := runner.DecodeMessage(raw)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := runner.DecodeDelta(m.Line.Data); err != nil || d.Offset != 1234 {
			t.Fatal(d, err)
		}
	})
	if n > 8 {
		t.Errorf("%v allocations, at most 8 are allowed", n)
	}
}

func BenchmarkDecodeTextLine(b *testing.B) {
	raw := textLine(b)
	b.Run("encoding/json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var m runner.Message
			var d runner.TextDelta
			if json.Unmarshal(raw, &m) != nil || json.Unmarshal(m.Line.Data, &d) != nil {
				b.Fatal("not decoded")
			}
		}
	})
	b.Run("DecodeMessage", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			m, err := runner.DecodeMessage(raw)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := runner.DecodeDelta(m.Line.Data); err != nil {
				b.Fatal(err)
			}
		}
	})
}
