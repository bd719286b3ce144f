package compact_test

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// values are beginnings for the fuzz tests.
var values = []string{
	`""`, `"a"`, `"ab\ncd\"\\\/\b\f\r\t"`, `"\u00e9\ud83d\ude00\ud83d\u0041\udead"`, `"\u12"`, `"\x"`, "\"\xff\xc3\"", "\"a\x01\"", `"é`, `"\ud83d\ud83d\ude00"`,
	"\"12345678\x1f\"", `"1234567\""`, "\"1234567\xe2\x80\xa8\"", `0`, `00`, `01`, `-0`, `-`, `1.`, `1.5e+3`, `1e`, `18446744073709551615`, `18446744073709551616`, `99999999999999999999`,
	`{}`, `[]`, `{"a":1,"a":2}`, `{"a":[1,{"b":null}],"c":true}`, `{"a"}`, `[1,]`, `[1 ,2]`, `{"a":1}x`, `nul`, `true`, strings.Repeat("[", 120) + strings.Repeat("]", 120),
	`"2025-06-15T12:30:45.123Z"`, `"2025-06-15T12:30:45+02:00"`, `"2025-06-15T24:30:45Z"`, `"2025-06-15t12:30:45Z"`, `"\u0032025-06-15T12:30:45Z"`, `"2025-06-15T12:30:45,5Z"`, `null`,
}

func FuzzReader(f *testing.F) {
	for _, v := range values {
		f.Add([]byte(v))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := compact.NewReader(b)
		if got := r.String(); r.AtEnd() {
			var want string
			if err := json.Unmarshal(b, &want); err != nil || got != want {
				t.Errorf("string %q is read as %q, want %q, %v", b, got, want, err)
			}
		}
		r = compact.NewReader(b)
		if got := r.Uint(math.MaxUint64); r.AtEnd() {
			var want uint64
			if err := json.Unmarshal(b, &want); err != nil || got != want {
				t.Errorf("number %q is read as %d, want %d, %v", b, got, want, err)
			}
		}
		r = compact.NewReader(b)
		if got := r.Uint(math.MaxUint32); r.AtEnd() {
			var want uint32
			if err := json.Unmarshal(b, &want); err != nil || got != uint64(want) {
				t.Errorf("number %q is read as %d, want %d, %v", b, got, want, err)
			}
		}
		r = compact.NewReader(b)
		if got := r.Time(); r.AtEnd() {
			var want time.Time
			if err := json.Unmarshal(b, &want); err != nil || !got.Equal(want) || got.String() != want.String() {
				t.Errorf("time %q is read as %s, want %s, %v", b, got, want, err)
			}
		}
		r = compact.NewReader(b)
		if got := r.Raw(); r.AtEnd() {
			var want json.RawMessage
			if err := json.Unmarshal(b, &want); err != nil || !bytes.Equal(got, want) {
				t.Errorf("value %q is read as %q, want %q, %v", b, got, want, err)
			}
			var short bytes.Buffer
			if err := json.Compact(&short, b); err != nil || !bytes.Equal(short.Bytes(), got) {
				t.Errorf("value %q has spaces, %v", b, err)
			}
		} else if r.Failed() && json.Valid(b) && !bytes.ContainsAny(b, " \t\r\n") && bytes.Count(b, []byte("["))+bytes.Count(b, []byte("{")) < 100 {
			t.Errorf("value %q is refused", b)
		}
	})
}

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "a", "\b\f\n\r\t\"\\/<>&\x7f\x00\x1f", "\u2028\u2029é😀\xff\xed\xa0\x80", "\ufffd"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var want bytes.Buffer
		enc := json.NewEncoder(&want)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(s); err != nil {
			t.Fatal(err)
		}
		if got := compact.AppendString(nil, s); string(got)+"\n" != want.String() {
			t.Errorf("%q is written as %s, want %s", s, got, want.Bytes())
		}
	})
}

func TestAppendTime_FailsWhereEncodingJSONFails(t *testing.T) {
	t.Parallel()
	for _, at := range []time.Time{
		{}, time.Unix(1, 5), time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(2025, 1, 1, 0, 0, 0, 120, time.FixedZone("", 5400)), time.Date(2025, 1, 1, 0, 0, 0, 0, time.FixedZone("", 90000)),
	} {
		want, wantErr := at.MarshalJSON()
		got, err := compact.AppendTime(nil, at)
		if string(got) != string(want) || (err == nil) != (wantErr == nil) {
			t.Errorf("%s is written as %s, %v; want %s, %v", at, got, err, want, wantErr)
		}
	}
}
