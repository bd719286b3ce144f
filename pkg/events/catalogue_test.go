package events_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/spoolhq/spool/pkg/events"
)

var update = flag.Bool("update", false, "write the goldens of types that have none; existing goldens are not changed")

// goldenTime is the time of every event in the goldens.
var goldenTime = time.Date(2025, 6, 15, 12, 30, 45, 123456789, time.UTC)

// fill sets every field of a value: strings to their path, numbers to different values, lists to two elements, and
// raw JSON to a text that must be kept byte for byte.
func fill(v reflect.Value, path string, n *int) {
	*n++
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(goldenTime))
		return
	case json.RawMessage:
		v.Set(reflect.ValueOf(json.RawMessage(fmt.Sprintf(`{"at":%q,"z":1.50,"a":["<é>",null]}`, path))))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(path + ` <&> "é"`)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.25)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), path, n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), fmt.Sprintf("%s[%d]", path, i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		element := reflect.New(v.Type().Elem()).Elem()
		fill(element, path+"[key]", n)
		v.SetMapIndex(reflect.ValueOf("key").Convert(v.Type().Key()), element)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), path+"."+v.Type().Field(i).Name, n)
		}
	default:
		panic(fmt.Sprintf("%s: fill does not support %s", path, v.Kind()))
	}
}

// filledPayload returns a payload of the type with every field set.
func filledPayload(e events.TypeInfo) events.Payload {
	v := reflect.New(reflect.TypeOf(e.New())).Elem()
	n := 0
	fill(v, v.Type().Name(), &n)
	return v.Interface().(events.Payload)
}

// subjectOf returns a subject with the aspect of the type.
func subjectOf(e events.TypeInfo) events.Subject {
	if e.Aspect.IsCatalogue() {
		return events.Subject{Tenant: "acme", ID: events.CatalogueID(e.Aspect, "acme", "organization", "acme", "ci"), Aspect: e.Aspect}
	}
	return events.Subject{Tenant: "acme", ID: events.DeriveID(events.KindSession, "golden"), Aspect: e.Aspect}
}

// golden returns a commit with one event of the type, with every field set.
func golden(t *testing.T, e events.TypeInfo) events.Commit {
	t.Helper()
	d := events.Draft{
		V: 1, ID: events.DeriveID(events.KindCommit, "golden", string(e.Type)), Actor: events.Actor{Kind: "executor", ID: events.DeriveID(events.KindExecutor, "golden")}, Epoch: 3,
		Events: []events.Event{{
			ID: events.DeriveID(events.KindEvent, "golden", string(e.Type)), Time: goldenTime, ExecutionID: events.DeriveID(events.KindExecution, "golden"),
			ConversationID: events.MainConversation, Source: events.FromRunner, N: 7, Data: filledPayload(e),
		}},
		State: map[string]any{"v": 1},
	}
	c, err := d.Seal(subjectOf(e), strings.Repeat("ab", 32))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEventTypes_DescribeEveryType(t *testing.T) {
	t.Parallel()
	seen := map[events.Type]bool{}
	for _, e := range events.EventTypes() {
		t.Run(string(e.Type), func(t *testing.T) {
			if seen[e.Type] {
				t.Error("the type is in the catalogue twice")
			}
			seen[e.Type] = true
			if got := snake(reflect.TypeOf(e.New()).Name()); got != string(e.Type) {
				t.Errorf("the wire form of its Go name is %s", got)
			}
			if e.Aspect != events.Life && e.Aspect != events.Run && !e.Aspect.IsCatalogue() {
				t.Errorf("aspect %q is not an aspect of the log", e.Aspect)
			}
			if !strings.HasSuffix(e.Doc, ".") || strings.ContainsAny(e.Doc, "\n|") || len(e.Doc) < 10 {
				t.Errorf("%q is not a line for the documentation", e.Doc)
			}
			if found, ok := events.LookupType(e.Type); !ok || found.Type != e.Type {
				t.Error("the type is not found by its name")
			}
			if e.New().EventType() != e.Type {
				t.Errorf("New returns a payload of type %s", e.New().EventType())
			}
		})
	}
	if _, ok := events.LookupType("no_such_type"); ok {
		t.Error("an unknown type was found")
	}
}

// snake converts a Go name to its wire form.
func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// TestEventTypes_HaveEveryPayload compares the catalogue with the payload types in the source code.
func TestEventTypes_HaveEveryPayload(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	sealed := regexp.MustCompile(`(?m)^func \((?:\w+ )?(\w+)\) sealed\(\)`)
	n := 0
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range sealed.FindAllSubmatch(src, -1) {
			if name := string(m[1]); name != "OpaquePayload" {
				n++
				if _, ok := events.LookupType(events.Type(snake(name))); !ok {
					t.Errorf("%s is a payload without a line in the catalogue", name)
				}
			}
		}
	}
	if n != len(events.EventTypes()) {
		t.Errorf("%d payload types, %d in the catalogue", n, len(events.EventTypes()))
	}
}

func TestEventTypes_AreDocumented(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.EventTypes() {
		if !bytes.Contains(doc, []byte(e.Type)) || !bytes.Contains(doc, []byte(e.Doc)) {
			t.Errorf("docs/events.md does not list %s: run go generate", e.Type)
		}
	}
}

// TestGoldens_ReleasedTypesKeepTheirBytes compares the encoding of every type with its golden. The encoding of a
// released type never changes.
func TestGoldens_ReleasedTypesKeepTheirBytes(t *testing.T) {
	t.Parallel()
	dir := filepath.Join("testdata", "golden")
	for _, e := range events.EventTypes() {
		t.Run(string(e.Type), func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(dir, string(e.Type)+".json")
			c := golden(t, e)
			got, err := c.Encode()
			if err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(path)
			if os.IsNotExist(err) && *update {
				want = append(got, '\n')
				err = os.WriteFile(path, want, 0o644)
			}
			if err != nil {
				t.Fatalf("%v; a new type gets its golden from: go test ./events -run TestGoldens_ReleasedTypesKeepTheirBytes -update", err)
			}
			want = bytes.TrimSuffix(want, []byte("\n"))
			if !bytes.Equal(got, want) {
				t.Errorf("the bytes changed. A released type never does: make a new type, or an upcaster.\ngot  %s\nwant %s", got, want)
			}
			readBack(t, e, want)
		})
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if _, ok := events.LookupType(events.Type(strings.TrimSuffix(f.Name(), ".json"))); !ok {
			t.Errorf("%s is the golden of a type that is gone", f.Name())
		}
	}
}

// TestGoldens_EarlierEncodingsStayReadable tests goldens of earlier releases. A released type may gain fields that
// are omitted when they are empty. Events from before are read as they were, and are encoded the same.
func TestGoldens_EarlierEncodingsStayReadable(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("testdata", "golden-before", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d goldens, %v", len(files), err)
	}
	for _, f := range files {
		msg, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		c, err := events.DecodeCommit(bytes.TrimSuffix(msg, []byte("\n")))
		if err != nil {
			t.Fatal(err)
		}
		list, err := c.DecodeEvents()
		if err != nil {
			t.Fatal(err)
		}
		e, known := events.LookupType(list[0].Type())
		if !known || list[0].Data == nil {
			t.Fatalf("%s is read as %#v", f, list[0].Data)
		}
		if c.ComputeHash(subjectOf(e)) != c.Hash {
			t.Errorf("%s: the hash is not that of the bytes", f)
		}
		d, err := events.Draft{ID: c.ID, Actor: c.Actor, Epoch: c.Epoch, Events: list}.Seal(subjectOf(e), c.Prev)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(d.Events, c.Events) {
			t.Errorf("%s is written as\n%s, before it was\n%s", f, d.Events, c.Events)
		}
	}
}

// readBack decodes a golden and compares the result with the payload from which it was built.
func readBack(t *testing.T, e events.TypeInfo, msg []byte) {
	t.Helper()
	c, err := events.DecodeCommit(msg)
	if err != nil {
		t.Fatal(err)
	}
	if c.ComputeHash(subjectOf(e)) != c.Hash {
		t.Error("the hash is not that of the bytes that were read")
	}
	list, err := c.DecodeEvents()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || !reflect.DeepEqual(list[0].Data, filledPayload(e)) {
		t.Errorf("the data reads back as %#v", list)
	}
	if list[0].N != 7 || !list[0].Time.Equal(goldenTime) || list[0].Source != events.FromRunner || list[0].ConversationID != events.MainConversation {
		t.Errorf("the event reads back as %+v", list[0])
	}
	// The data is also the same after a conversion to the wire form, which exports and clients use.
	w, err := list[0].ToWire("ses", 12, "0-7")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	var back events.WireEvent
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	again := back.Event()
	again.N = list[0].N // the wire form does not contain N
	if !sameJSON(t, again, list[0]) {
		t.Errorf("through the wire it becomes %+v", again)
	}
}

// sameJSON compares two events as JSON, without regard to spacing and escapes, which the encoder of a client may
// choose.
func sameJSON(t *testing.T, a, b events.Event) bool {
	t.Helper()
	var x, y any
	for v, e := range map[*any]events.Event{&x: a, &y: b} {
		data, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, v); err != nil {
			t.Fatal(err)
		}
	}
	return reflect.DeepEqual(x, y)
}

func TestTerminal_ReportsTheTypesThatEndAnExecution(t *testing.T) {
	t.Parallel()
	want := map[events.Type]bool{"execution_completed": true, "execution_failed": true, "execution_cancelled": true, "execution_withdrawn": true}
	for _, e := range events.EventTypes() {
		if events.IsTerminal(e.Type) != want[e.Type] {
			t.Errorf("%s: terminal is %v", e.Type, events.IsTerminal(e.Type))
		}
	}
}

// TestDecode_KeepsUnknownEvents tests that events of a newer or of a faulty version are kept byte for byte.
func TestDecode_KeepsUnknownEvents(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]string{
		"from_the_future":  `{"z":1,"a":[1.50,"<é>\u2028"],"n":12345678901234567890}`,
		"a_scalar":         `"text"`,
		"message_accepted": `{"blockId":17}`, // a known type whose data cannot be decoded
		"execution_queued": `[]`,
	} {
		stored := `{"id":"evt_1","type":"` + name + `","time":"2025-06-15T12:30:45Z","source":"runner","n":7,"data":` + data + `}`
		var e events.Event
		if err := json.Unmarshal([]byte(stored), &e); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		o, ok := e.Data.(events.OpaquePayload)
		if !ok || o.EventType() != events.Type(name) || string(o.Raw) != data {
			t.Errorf("%s is read as %#v", name, e.Data)
		}
		c, err := events.Draft{ID: events.DeriveID(events.KindCommit, name), Events: []events.Event{e}}.Seal(subjectOf(events.EventTypes()[0]), "")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(c.Events, []byte(data)) || string(c.Events) != "["+stored+"]" {
			t.Errorf("%s is written as %s, want %s", name, c.Events, stored)
		}
	}
}
