package wirejson

import (
	"bytes"
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

func TestUnmarshal_NamesTheInvalidField(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, body, want string }{
		{"unknown field", `{"contents":"x"}`, "contents: unknown field; must be one of sessionId, content, parts, metadata, workspaceFiles, environment, permissions"},
		{"proto name", `{"session_id":"x"}`, "session_id: unknown field; must be one of sessionId, content, parts, metadata, workspaceFiles, environment, permissions"},
		{"number for a string", `{"content":5}`, "content: must be a string, not 5"},
		{"object for a string", `{"content":{"a":1}}`, "content: must be a string, not an object"},
		{"string for a list", `{"parts":"x"}`, "parts: must be a list, not a string"},
		{"nested", `{"parts":[{"type":"text"},{"typ":"x"}]}`, "parts[1].typ: unknown field; must be one of type, text, mediaType, data"},
		{"twice", `{"content":"a","content":"b"}`, "content: is set twice"},
		{"not an object", `["x"]`, "must be an object, not a list"},
		{"half an object", `{"content":"a"`, "not valid JSON: unexpected end"},
		{"half a string", `{"content":"a`, "content: not valid JSON: unexpected end"},
		{"something behind", `{"content":"a"} x`, "not valid JSON: there is data after the object"},
		{"invalid UTF-8", "{\"content\":\"a\xff\"}", "content: the text is not valid UTF-8"},
		{"half a pair", `{"content":"a\ud800b"}`, `content: the text holds half of a surrogate pair (\ud800 to \udfff)`},
		{"deep metadata", `{"metadata":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `}`, "metadata: nested deeper than 512 levels"},
		{"a secret that is a number", `{"environment":{"PIN":{"value":123456,"secret":true}}}`, "environment.PIN.value: must be a string, not a number"},
		{"a list of variables", `{"environment":[]}`, "environment: must be an object, not a list"},
		{"no variable", `{"environment":{"A":null}}`, "environment.A: must be an object, not null"},
		{"a variable twice", `{"environment":{"A":{},"A":{}}}`, "environment.A: is set twice"},
		{"deep document", strings.Repeat(`{"a":`, 100_000), "a: nested deeper than 512 levels"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			err := Unmarshal([]byte(c.body), &spoolv1.PostMessageRequest{})
			if err == nil || err.Error() != c.want {
				t.Errorf("got %v\nwant %s", err, c.want)
			}
		})
	}
	for body, want := range map[string]string{
		`{"sessionOptions":{"idleTimeoutMs":-1}}`:         "sessionOptions.idleTimeoutMs: must be a whole number from 0 to 4294967295, not -1",
		`{"sessionOptions":{"idleTimeoutMs":4294967296}}`: "sessionOptions.idleTimeoutMs: must be a whole number from 0 to 4294967295, not 4294967296",
		`{"sessionOptions":{"idleTimeoutMs":"5"}}`:        "sessionOptions.idleTimeoutMs: must be a whole number from 0 to 4294967295, not a string",
		`{"sessionOptions":{"budget":{"costUsd":"5"}}}`:   "sessionOptions.budget.costUsd: must be a number, not a string",
		`{"sessionOptions":{"budget":{"costUsd":1e999}}}`: "sessionOptions.budget.costUsd: must be a number, not 1e999",
		`{"sessionOptions":[]}`:                           "sessionOptions: must be an object, not a list",
		`{"agent":7}`:                                     "agent: must be a reference, which is a string or an object, not 7",
		`{"agent":{}}`:                                    `agent.slug: "" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens`,
		`{"agent":{"slug":"a","colour":"red"}}`:           "agent.colour: unknown field; must be one of scope, org, kind, slug, version",
		`{"agent":{"slug":"a","kind":"instance"}}`:        `agent.kind: must be agent, not "instance"`,
		`{"instance":{"slug":"a","slug":"b"}}`:            "instance.slug: is set twice",
		`{"environments":["a",{"slug":"b","org":"O"}]}`:   `environments[1].org: "O" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens`,
		`{"environments":[null]}`:                         "environments[0]: must be a reference, which is a string or an object, not null",
		`{"agentProfileRef":{"slug":"a","version":"V"}}`:  `agentProfileRef.version: "V" is neither a tag (1 to 64 characters of a-z, 0-9, dots, hyphens and underscores) nor a SHA-256 in hex`,
		`{"model":{"slug":"a"}}`:                          "model: must be a string, not an object",
	} {
		if err := Unmarshal([]byte(body), &spoolv1.CreateSessionRequest{}); err == nil || err.Error() != want {
			t.Errorf("%s: got %v\nwant %s", body, err, want)
		}
	}
}

// TestUnmarshal_AcceptsReferencesInBothForms tests that every request field that holds references accepts both forms,
// and so do references in definitions.
func TestUnmarshal_AcceptsReferencesInBothForms(t *testing.T) {
	t.Parallel()
	var r spoolv1.CreateSessionRequest
	body := `{"agent":{"scope":"platform","org":"o","kind":"agent","slug":"a","version":"v1"},"agentProfileRef":"platform/o/a@v1",
		"instance":{"scope":"organization","slug":"i"},"environments":[{"scope":"identity_account","org":"acc","kind":"environment","slug":"e"},"f@latest"]}`
	if err := Unmarshal([]byte(body), &r); err != nil {
		t.Fatal(err)
	}
	if r.Agent != "platform/o/a@v1" || r.AgentProfileRef != r.Agent || r.Instance != "i" || !slices.Equal(r.Environments, []string{"identity_account/acc/e", "f@latest"}) {
		t.Errorf("got %v", &r)
	}
	fields := 0
	messages := spoolv1.File_spool_v1_spool_proto.Messages()
	for i := range messages.Len() {
		for j := range messages.Get(i).Fields().Len() {
			fd := messages.Get(i).Fields().Get(j)
			if !spoolv1.HoldsReference(fd.FullName()) {
				continue
			}
			fields++
			if events.ReferenceKind(fd.JSONName()) == "" || fd.Kind() != protoreflect.StringKind {
				t.Errorf("%s holds references of no kind", fd.FullName())
			}
		}
	}
	if fields != 12 {
		t.Errorf("%d fields of spool.v1 hold references, HoldsReference names 12", fields)
	}
}

func TestUnmarshal_AcceptsValidMessages(t *testing.T) {
	t.Parallel()
	var got spoolv1.CreateSessionRequest
	body := ` {"agent":null,"model":"m","sessionOptions":{"turnLimitMs":4294967295},"metadata": {"b":1152921504606846976, "a":[1.50,null],"a":"\ud83d\ude00"}} `
	if err := Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	want := &spoolv1.CreateSessionRequest{
		Model: "m", SessionOptions: &spoolv1.SessionOptions{TurnLimitMs: 1<<32 - 1},
		Metadata: &spoolv1.Json{Text: `{"b":1152921504606846976,"a":[1.50,null],"a":"\ud83d\ude00"}`},
	}
	if !proto.Equal(&got, want) {
		t.Errorf("got %v\nwant %v", &got, want)
	}
	var budget spoolv1.SetBudgetRequest
	if err := Unmarshal([]byte(`{"budget":{"turns":1,"tokens":9007199254740992,"costUsd":0.5,"timeMs":1e3}}`), &budget); err != nil ||
		!proto.Equal(budget.GetBudget(), &spoolv1.Budget{Turns: 1, Tokens: 1 << 53, CostUsd: 0.5, TimeMs: 1000}) {
		t.Errorf("got %v, %v", &budget, err)
	}
	var null spoolv1.CreateSessionRequest
	if err := Unmarshal([]byte(`{"metadata":null}`), &null); err != nil || null.GetMetadata().GetText() != "null" {
		t.Errorf("null is metadata like any other JSON: got %v, %v", null.GetMetadata(), err)
	}
}

// TestEventIsWrittenAsStored tests that an event is returned as its stored bytes.
func TestEventIsWrittenAsStored(t *testing.T) {
	t.Parallel()
	wire := events.WireEvent{
		Seq: 12, Position: "0-48211", ID: "evt_x", Type: "block_start", Time: time.Date(2026, 1, 2, 3, 4, 5, 678900000, time.UTC),
		SessionID: "ses_x", ExecutionID: "exe_x", ConversationID: "main", Source: events.FromRunner,
		Data: json.RawMessage(`{"n":1152921504606846976,"t":"<&>\u2028\u0000é"}`),
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(wire); err != nil {
		t.Fatal(err)
	}
	id, exe, conv := wire.ID, wire.ExecutionID, wire.ConversationID
	got := Marshal(&spoolv1.Event{
		Seq: 12, Position: wire.Position, Id: &id, Type: "block_start", Time: timestamppb.New(wire.Time), SessionId: wire.SessionID,
		ExecutionId: &exe, ConversationId: &conv, Source: "runner", Data: JSONFromText(string(wire.Data)),
	})
	if want := strings.TrimSpace(b.String()); string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestEveryMessageHasJSON tests that every message can be encoded, every request decoded by a server and every message
// decoded by a client, with all fields set.
func TestEveryMessageHasJSON(t *testing.T) {
	t.Parallel()
	list := spoolv1.File_spool_v1_spool_proto.Messages()
	for i := range list.Len() {
		d := list.Get(i)
		m := fill(d).Interface()
		b := Marshal(m)
		if !json.Valid(b) {
			t.Errorf("%s: %s is not JSON", d.Name(), b)
		}
		if strings.HasSuffix(string(d.Name()), "Request") {
			back := m.ProtoReflect().New().Interface()
			if err := Unmarshal(b, back); err != nil || !proto.Equal(m, back) {
				t.Errorf("%s: read back %v, %v", d.Name(), back, err)
			}
		}
		if d.FullName() == jsonMessageName { // never a response
			continue
		}
		back := m.ProtoReflect().New().Interface()
		if err := UnmarshalResponse(b, back); err != nil || !proto.Equal(m, back) {
			t.Errorf("%s: a client decodes %v, %v", d.Name(), back, err)
		}
	}
}

func TestUnmarshalResponse_IgnoresUnknownFields(t *testing.T) {
	t.Parallel()
	var got spoolv1.Session
	body := `{"sessionId":"ses_x","newer":{"a":[1]},"sessionOptions":{"model":"m","newer":1},"metadata":[1,"x"],"updatedAt":"2026-01-02T03:04:05.6Z","title":null}`
	if err := UnmarshalResponse([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	want := &spoolv1.Session{
		SessionId: "ses_x", SessionOptions: &spoolv1.SessionOptions{Model: "m"}, Metadata: JSONFromText(`[1,"x"]`),
		UpdatedAt: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 600_000_000, time.UTC)),
	}
	if !proto.Equal(&got, want) {
		t.Errorf("got %v\nwant %v", &got, want)
	}
	const wrong = `{"updatedAt":"yesterday"}`
	if err := UnmarshalResponse([]byte(wrong), &got); err == nil || err.Error() != "updatedAt: must be a time in RFC 3339, not a string" {
		t.Errorf("%s: got %v", wrong, err)
	}
}

func TestMarshalRequest_OmitsDefaultValues(t *testing.T) {
	t.Parallel()
	zero := uint32(0)
	got := MarshalRequest(&spoolv1.ForkSessionRequest{SessionId: "ses_x", At: &zero, Metadata: JSONFromText(`{"n":null}`)})
	if want := `{"sessionId":"ses_x","at":0,"metadata":{"n":null}}`; string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := MarshalRequest(&spoolv1.SyncSessionRequest{}); string(got) != "{}" {
		t.Errorf("got %s", got)
	}
}

func TestUnmarshalNeverPanics(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		body := rapid.OneOf(
			rapid.SliceOf(rapid.Byte()),
			rapid.Map(rapid.StringMatching(`\{"(content|parts|metadata)":[\[\]{}",:0-9a-z\\]{0,20}\}?`), func(s string) []byte { return []byte(s) }),
		).Draw(t, "body")
		err := Unmarshal(body, &spoolv1.PostMessageRequest{})
		if err == nil && !json.Valid(body) {
			t.Fatalf("%q was taken", body)
		}
	})
}

func TestCheckQuery_NamesTheInvalidParameter(t *testing.T) {
	t.Parallel()
	d := (&spoolv1.ListEventsRequest{}).ProtoReflect().Descriptor()
	inPath := func(f string) bool { return f == "session_id" }
	for query, want := range map[string]string{
		"after=0&limit=5&types=a&types=b": "",
		"after=-1":                        `after: must be a whole number from 0 to 4294967295, not "-1"`,
		"after=18446744073709551616":      `after: must be a whole number from 0 to 4294967295, not "18446744073709551616"`,
		"after=":                          `after: must be a whole number from 0 to 4294967295, not ""`,
		"after=1&after=2":                 "after: the parameter is given more than once",
		"afer=1":                          "afer: unknown parameter; must be one of after, limit, types, minPosition, metadata",
		"sessionId=x":                     "sessionId: unknown parameter; must be one of after, limit, types, minPosition, metadata",
		"metadata=0":                      "",
		"metadata=no":                     `metadata: must be true or false, 1 or 0, not "no"`,
		"types=%ff":                       "types: the text is not valid UTF-8",
	} {
		q, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := CheckQuery(q, d, inPath); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: got %s\nwant %s", query, got, want)
		}
	}
}

// fill sets every field of a message, so that every kind is tested.
func fill(d protoreflect.MessageDescriptor) protoreflect.Message {
	if d.FullName() == timestampMessageName {
		return timestamppb.New(time.Unix(1, 0)).ProtoReflect()
	}
	if d.FullName() == jsonMessageName {
		return JSONFromText(`{"a":1}`).ProtoReflect()
	}
	m := protoMessage(d)
	for i := range d.Fields().Len() {
		fd := d.Fields().Get(i)
		value := func(fd protoreflect.FieldDescriptor) protoreflect.Value {
			switch fd.Kind() {
			case protoreflect.StringKind:
				return protoreflect.ValueOfString("text")
			case protoreflect.BoolKind:
				return protoreflect.ValueOfBool(true)
			case protoreflect.Uint32Kind:
				return protoreflect.ValueOfUint32(7)
			case protoreflect.DoubleKind:
				return protoreflect.ValueOfFloat64(0.25)
			}
			return protoreflect.ValueOfMessage(fill(fd.Message()))
		}
		if fd.IsMap() {
			m.Mutable(fd).Map().Set(protoreflect.ValueOfString("b").MapKey(), value(fd.MapValue()))
			m.Mutable(fd).Map().Set(protoreflect.ValueOfString("a").MapKey(), value(fd.MapValue()))
			continue
		}
		if fd.IsList() {
			m.Mutable(fd).List().Append(value(fd))
			continue
		}
		m.Set(fd, value(fd))
	}
	return m
}

func protoMessage(d protoreflect.MessageDescriptor) protoreflect.Message {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic(err)
	}
	return t.New()
}
