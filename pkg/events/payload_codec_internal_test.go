package events

import (
	"encoding/json"
	"math"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// fill sets all fields of v, each to its zero value now and then, so that a new field of a payload is tested too.
func fill(t *rapid.T, v reflect.Value) {
	if rapid.IntRange(0, 2).Draw(t, "zero") == 0 {
		return
	}
	switch x := v.Addr().Interface().(type) {
	case *json.RawMessage:
		*x = rapid.SampledFrom([]json.RawMessage{
			{}, json.RawMessage(`{"a":[1.50,"<&>\u2028"],"a":null}`), json.RawMessage("\"\u2028\xff\""), json.RawMessage(`{"a": 1}`), json.RawMessage(`{`), json.RawMessage(`null`),
		}).Draw(t, "raw")
		return
	case *time.Time:
		*x = anyTime().Draw(t, "time")
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(anyText().Draw(t, "text"))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint32:
		v.SetUint(uint64(rapid.Uint32().Draw(t, "uint32")))
	case reflect.Uint64:
		v.SetUint(rapid.Uint64().Draw(t, "uint64"))
	case reflect.Float64:
		v.SetFloat(rapid.SampledFrom([]float64{0.5, 1e-9, 1e30}).Draw(t, "float"))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), rapid.IntRange(0, 2).Draw(t, "length"), 2))
		for i := range v.Len() {
			fill(t, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(t, v.Field(i))
			}
		}
	case reflect.Pointer:
	default:
		t.Fatalf("%s is not filled", v.Type())
	}
}

// codecPayloads are the payloads that are encoded and decoded without reflection.
var codecPayloads = []Payload{
	BlockStart{}, BlockComplete{}, Log{}, MetadataUpdate{}, MessageAccepted{}, ExecutionClaimed{}, ExecutionStarted{}, ExecutionCompleted{},
}

func TestPayloads_AreCodedLikeEncodingJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := reflect.New(reflect.TypeOf(rapid.SampledFrom(codecPayloads).Draw(t, "type"))).Elem()
		fill(t, v)
		p := v.Interface().(Payload)
		got, err := appendPayloadJSON([]byte("x"), p)
		if err == nil {
			got = got[1:]
		}
		requireSameJSON(t, got, err, p)
		if err != nil {
			return
		}
		requireSamePayload(t, p.EventType(), got)
		e := Event{ID: "evt", Source: FromRunner, Time: time.Unix(1, 0), Data: p}
		w, err := e.ToWire("ses", 7, "0-1")
		if err != nil {
			t.Fatal(err)
		}
		wire, err := e.AppendWire(nil, "ses", 7, "0-1")
		requireSameJSON(t, wire, err, w)
		if b, isBlock := p.(BlockStart); isBlock {
			raw, err := b.Block.AppendJSON(nil)
			requireSameJSON(t, raw, err, b.Block)
		}
	})
}

// TestPayloads_UsualOnesAreCodedWithoutReflection tests that the payloads of agents do not fall back to encoding/json.
func TestPayloads_UsualOnesAreCodedWithoutReflection(t *testing.T) {
	t.Parallel()
	b := Block{ID: "blk_1", Kind: KindToolUse, Status: StatusComplete, ToolName: "bash", ToolUseID: "t", Input: json.RawMessage(`{"command":"ls \u003c"}`), Output: "é\n", IsError: true, DurationMs: 3}
	for _, p := range append([]Payload{BlockStart{Block: b}, BlockStart{Block: b, TextAfter: math.MaxUint64}, BlockComplete{b}, MetadataUpdate{Usage: Usage{1, 2, 3, 4}, Model: "m"}}, codecPayloads...) {
		data, ok := appendCompactPayload(nil, p)
		if !ok {
			t.Errorf("%+v is encoded by encoding/json", p)
		}
		back, ok := decodeCompactPayload(p.EventType(), data)
		if !ok || !reflect.DeepEqual(back, p) {
			t.Errorf("%s is decoded as %+v, %v", data, back, ok)
		}
	}
}

// requireSamePayload compares the decoded data of a type with the result of encoding/json.
func requireSamePayload(t interface{ Fatalf(string, ...any) }, name Type, data []byte) {
	got, ok := decodeCompactPayload(name, data)
	if !ok {
		return
	}
	entry, _ := LookupType(name)
	want, err := entry.decode(data)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%s %s:\ngot  %+v\nwant %+v, %v", name, data, got, want, err)
	}
}

func FuzzDecodePayloadLikeEncodingJSON(f *testing.F) {
	b := Block{ID: "blk_1", Kind: "k\xff", Input: json.RawMessage(`{"a":[1]}`), IsError: true, DurationMs: 3, Content: "\u2028<"}
	for i, p := range append([]Payload{BlockStart{Block: b}, BlockStart{Block: b, TextAfter: math.MaxUint64}, BlockComplete{b}, MetadataUpdate{Usage: Usage{1, 2, 3, 4}, Model: "m"}}, codecPayloads...) {
		data, err := appendPayloadJSON(nil, p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(i, data)
	}
	f.Add(0, []byte(`{"block":{"id":"a","kind":"b","status":"c","timestamp":"2026-01-02T03:04:05Z","isError":false}}`))
	f.Add(0, []byte(`{"block":{"id":"a","kind":"b","status":"c","timestamp":"2026-01-02T03:04:05Z","durationMs":4294967296}}`))
	f.Add(0, []byte(`{"block":{"ID":"a","id":"\ud800","kind":"b","status":"c","timestamp":"2026-01-02T03:04:05+01:00"}} `))
	f.Fuzz(func(t *testing.T, i int, data []byte) {
		requireSamePayload(t, codecPayloads[uint(i)%uint(len(codecPayloads))].EventType(), data)
	})
}

func TestSizeOfJSON_EqualsTheEncodedLength(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{`{}`, `{"a": 1}`, `"<"`, `"&"`, `"é"`, "\"\u2028\"", "\"\u20ac\"", "\"\xff\"", `{`, ``} {
		want := len(raw)
		if stored, err := json.Marshal(json.RawMessage(raw)); err == nil {
			want = len(stored)
		}
		if got := jsonSize(json.RawMessage(raw)); got != want {
			t.Errorf("%q: %d, want %d", raw, got, want)
		}
	}
	if got := jsonSize(nil); got != 4 {
		t.Errorf("nil: %d, want 4", got)
	}
}

// setFirst sets v, or for a struct the n-th of its fields at any depth, to a value that is not zero. It returns how many fields were
// passed, and whether one was set.
func setFirst(v reflect.Value, n int) (passed int, set bool) {
	switch v.Addr().Interface().(type) {
	case *json.RawMessage:
		if n == 0 {
			v.SetBytes([]byte(`{"a":1}`))
		}
		return 1, n == 0
	case *time.Time:
		if n == 0 {
			v.Set(reflect.ValueOf(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)))
		}
		return 1, n == 0
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if !v.Type().Field(i).IsExported() {
				continue
			}
			p, ok := setFirst(v.Field(i), n-passed)
			if passed += p; ok {
				return passed, true
			}
		}
		return passed, false
	case reflect.Slice:
		if n == 0 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
	case reflect.Map:
		if n == 0 {
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(reflect.Zero(v.Type().Key()), reflect.Zero(v.Type().Elem()))
		}
	case reflect.Pointer:
		if n == 0 {
			v.Set(reflect.New(v.Type().Elem()))
		}
	case reflect.String:
		if n == 0 {
			v.SetString("x")
		}
	case reflect.Bool:
		if n == 0 {
			v.SetBool(true)
		}
	case reflect.Float64:
		if n == 0 {
			v.SetFloat(0.5)
		}
	default:
		if n == 0 {
			v.SetUint(1)
		}
	}
	return 1, n == 0
}

// TestAppendData_KeepsEachField tests that no payload loses a field that is the only one with a value. A codec without reflection that does
// not know a new field would drop it.
func TestAppendData_KeepsEachField(t *testing.T) {
	t.Parallel()
	for _, e := range EventTypes() {
		for n := 0; ; n++ {
			v := reflect.New(reflect.TypeOf(e.New())).Elem()
			if _, set := setFirst(v, n); !set {
				break
			}
			p, ok := v.Interface().(Payload)
			if !ok {
				t.Fatalf("%s is not a payload", v.Type())
			}
			want, err := marshalJSON(p)
			if err != nil {
				t.Fatal(err)
			}
			got, err := appendPayloadJSON(nil, p)
			if err != nil || string(got) != string(want) {
				t.Errorf("%s, field %d: %s, %v\nwant %s", e.Type, n, got, err, want)
			}
		}
	}
}
