package modelbody_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spoolhq/spool/services/executor/internal/egress/modelbody"
)

func nothing(string) bool { return false }

func TestCheck_NamesTheModel(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"model":"gpt-5","input":"x"}`:                                        "gpt-5",
		`{"input":[{"model":"no","text":"\"model\":\"no\""}],"model" : "yes"}`: "yes",
		`{"metadata":{"model":"no"}}`:                                          "",
		`{"model":5}`:                                                          "",
		`{"model":"\u006d"}`:                                                   "m",
	} {
		if got, err := modelbody.Check(modelbody.ProtocolOpenAI, []byte(body), nothing); got != want || err != nil {
			t.Errorf("%s: %q, %v, want %q", body, got, err, want)
		}
	}
}

// decoded reports whether encoding/json accepts a document, and whether an object in it has a key twice.
func decoded(body []byte) (valid, twice bool) {
	if !json.Valid(body) || !utf8.Valid(body) || !strings.HasPrefix(strings.TrimLeft(string(body), " \t\r\n"), "{") {
		return false, false
	}
	type open struct {
		keys map[string]bool // nil for an array
		key  bool            // a key comes next
	}
	var stack []*open
	dec := json.NewDecoder(strings.NewReader(string(body)))
	dec.UseNumber()
	for {
		token, err := dec.Token()
		if err != nil {
			return true, twice
		}
		var top *open
		if len(stack) > 0 {
			top = stack[len(stack)-1]
		}
		if name, ok := token.(string); ok && top != nil && top.keys != nil && top.key {
			twice = twice || top.keys[name]
			top.keys[name], top.key = true, false
			continue
		}
		if top != nil {
			top.key = top.keys != nil
		}
		switch token {
		case json.Delim('{'):
			stack = append(stack, &open{keys: map[string]bool{}, key: true})
		case json.Delim('['):
			stack = append(stack, &open{})
		case json.Delim('}'), json.Delim(']'):
			stack = stack[:len(stack)-1]
			if len(stack) > 0 {
				stack[len(stack)-1].key = stack[len(stack)-1].keys != nil
			}
		}
	}
}

// FuzzCheck_ReadsWhatEncodingJSONReads tests that a body is unreadable if, and only if, encoding/json refuses it, an
// object has a key twice, or it is nested too deep.
func FuzzCheck_ReadsWhatEncodingJSONReads(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"a":1,"a":2}`, `{"a":[1,-0.5e+9,true,false,null,"\u00e9\n"]}`, ` {"a" : {"b":[{}]} } `, `{"a":01}`, `{"a":.5}`, `{"a":1.}`, `{"a":-}`, `{"a":"\x"}`, `{"a":"\u12g4"}`, `{"\u0061":1,"a":2}`,
		`{"a":1,}`, `{,}`, `[1]`, `{"a":tru}`, `{"a"}`, "{\"a\":\"\t\"}", `{"\ud800":1,"\udbff":2}`, `{"a":{"k":1},"b":{"k":1}}`, `{"a":1} x`, "{\"\x00\":1}", `{"a":"\u00"}`, `{"a":"\uP000"}`, "{}\x00",
		`{"1":1,"2":1,"3":1,"4":1,"5":1,"6":1,"7":1,"8":1,"9":1,"10":1,"11":1,"12":1,"13":1,"14":1,"15":1,"16":1,"17":1,"18":1,"1":1}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		if strings.Count(body, "[")+strings.Count(body, "{") > 500 {
			t.Skip("it may be too deep")
		}
		_, err := modelbody.Check(modelbody.ProtocolAnthropic, []byte(body), func(string) bool { return true })
		var unreadable *modelbody.UnreadableError
		var denied *modelbody.DeniedError
		if errors.As(err, &denied) {
			return // the rest was not read
		}
		valid, twice := decoded([]byte(body))
		if got := errors.As(err, &unreadable); got != (!valid || twice) {
			t.Errorf("%q: %v; encoding/json takes it: %t, a key stands there twice: %t", body, err, valid, twice)
		}
	})
}

// turn returns the body of a request with the given size, as a CLI sends it during a session.
func turn(size int) []byte {
	var out strings.Builder
	out.WriteString(`{"model":"m","max_tokens":32000,"tools":[{"name":"Read","description":"reads","input_schema":{"type":"object","properties":{"path":{"type":"string"}}}}],"messages":[{"role":"user","content":"Go."}`)
	for i := 0; out.Len() < size; i++ {
		fmt.Fprintf(&out, `,{"role":"assistant","content":[{"type":"tool_use","id":"toolu_%d","name":"Read","input":{"path":"/workspace/file_%d.go"}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_%d","content":%q}]}`,
			i, i, i, strings.Repeat("func f() error {\n\treturn errors.New(\"no\")\n}\n", 20))
	}
	out.WriteString(`]}`)
	return []byte(out.String())
}

func BenchmarkCheck(b *testing.B) {
	body := turn(200 << 10)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := modelbody.Check(modelbody.ProtocolAnthropic, body, nothing); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkValid(b *testing.B) {
	body := turn(200 << 10)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if !json.Valid(body) {
			b.Fatal("it is not valid")
		}
	}
}
