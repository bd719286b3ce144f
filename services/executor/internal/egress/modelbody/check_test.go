package modelbody_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
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

// decoded reports whether encoding/json accepts a document, whether an object in it has a key twice, and whether a key has another
// form than the one in which the scanner compares keys.
func decoded(body []byte) (valid, twice, folds bool) {
	if !json.Valid(body) || !utf8.Valid(body) || !strings.HasPrefix(strings.TrimLeft(string(body), " \t\r\n"), "{") {
		return false, false, false
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
			return true, twice, folds
		}
		var top *open
		if len(stack) > 0 {
			top = stack[len(stack)-1]
		}
		if name, ok := token.(string); ok && top != nil && top.keys != nil && top.key {
			twice = twice || top.keys[name]
			folds = folds || modelbody.FoldKey(name) != name || len(name) > 100
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
// object has a key twice, or two keys that some servers read as equal.
func FuzzCheck_ReadsWhatEncodingJSONReads(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"a":1,"a":2}`, `{"a":[1,-0.5e+9,true,false,null,"\u00e9\n"]}`, ` {"a" : {"b":[{}]} } `, `{"a":01}`, `{"a":.5}`, `{"a":1.}`, `{"a":-}`, `{"a":"\x"}`, `{"a":"\u12g4"}`, `{"\u0061":1,"a":2}`,
		`{"a":1,}`, `{,}`, `[1]`, `{"a":tru}`, `{"a"}`, "{\"a\":\"\t\"}", `{"\ud800":1,"\udbff":2}`, `{"a":{"k":1},"b":{"k":1}}`, `{"a":1} x`, "{\"\x00\":1}", `{"a":"\u00"}`, `{"a":"\uP000"}`, "{}\x00",
		`{"A":1,"a":2}`, `{"metadata":{"A":1,"a":2,"\u0041":3}}`, `{"\ud83d\ude00":1,"\ud83d":2}`,
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
		valid, twice, folds := decoded([]byte(body))
		if got := errors.As(err, &unreadable); !got && (!valid || twice) || got && valid && !twice && !folds {
			t.Errorf("%q: %v; encoding/json takes it: %t, a key stands there twice: %t", body, err, valid, twice)
		}
	})
}

// FuzzUnescape_ReadsWhatEncodingJSONReads tests that escapes are decoded as encoding/json decodes them.
func FuzzUnescape_ReadsWhatEncodingJSONReads(f *testing.F) {
	for _, seed := range []string{`a`, `\"\\\/\b\f\n\r\t`, `\u0041\u00e9\uFFFD`, `\ud83d\ude00`, `\ud83d`, `\ude00\ud83d`, `\ud83d\u0041`, `\ud83d\ud83d\ude00x`, `\ud83dx`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var want string
		if !utf8.ValidString(text) || json.Unmarshal([]byte(`"`+text+`"`), &want) != nil {
			t.Skip("it is not the text of a JSON string")
		}
		if got := modelbody.Unescape(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	})
}

// hostileBodies are bodies with which an agent tries to make the proxy allocate as much memory as it can.
func hostileBodies(size int) map[string]string {
	keys := func(each func(i int) string) string {
		var out strings.Builder
		for i := 0; out.Len() < size; i++ {
			out.WriteString(each(i))
		}
		return out.String()
	}
	long := strings.Repeat("x", size)
	escaped := strings.Repeat(`\u0041`, size/6)
	return map[string]string{
		"millions of keys":                 `{"metadata":{` + keys(func(i int) string { return fmt.Sprintf(`"%x":0,`, i) }) + `"":0}}`,
		"millions of interpreted keys":     `{` + keys(func(i int) string { return fmt.Sprintf(`"%x":0,`, i) }) + `"":0}`,
		"millions of objects":              `{"metadata":[` + keys(func(int) string { return `{"a":0},` }) + `0]}`,
		"objects in each other, with keys": `{"metadata":` + keys(func(i int) string { return fmt.Sprintf(`{"%x":0,"%x":[{"a":0},`, i, i+1) }),
		"millions of blocks":               `{"messages":[` + keys(func(int) string { return `{"type":"\u0074","T":0},` }) + `0]}`,
		"millions of tools":                `{"tools":[` + keys(func(int) string { return `{"type":"bash_20250124"},` }) + `0]}`,
		"millions of letters":              `{"messages":[` + keys(func(int) string { return `{"\u00e9":0},` }) + `0]}`,
		"a huge key":                       `{"metadata":{"` + long + `":0}}`,
		"a huge interpreted key":           `{"` + long + `":0}`,
		"a huge key of escapes":            `{"metadata":{"` + escaped + `":0}}`,
		"a huge model":                     `{"model":"` + long + `"}`,
		"a huge model of escapes":          `{"model":"` + escaped + `"}`,
		"a huge type":                      `{"tools":[{"type":"` + long + `"}]}`,
		"a huge type of escapes":           `{"messages":[{"type":"` + escaped + `"}]}`,
		"a huge URL of escapes":            `{"image_url":"` + escaped + `"}`,
		"deep nesting":                     `{"metadata":` + strings.Repeat("[", size),
	}
}

// maxCheckBytes is the number of bytes that docs/limits.md promises for the check of a body.
const maxCheckBytes = 4 << 20

// Check allocates at most maxCheckBytes for a body, whatever its content, and not more for a larger body.
func TestCheck_AllocatesABoundedAmountOfMemory(t *testing.T) { //nolint:paralleltest // it measures the allocations of the process
	const small, large = 1 << 20, 2 << 20
	allocated := map[string]uint64{}
	for _, size := range []int{small, large} {
		for name, body := range hostileBodies(size) {
			raw := []byte(body)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := modelbody.Check(modelbody.ProtocolAnthropic, raw, nothing)
			runtime.ReadMemStats(&after)
			n := after.TotalAlloc - before.TotalAlloc
			if n > maxCheckBytes || size == large && n > allocated[name]+(large-small)/4 {
				t.Errorf("%s: %d bytes are allocated for a body of %d, and %d for one of %d (%v)", name, n, len(raw), allocated[name], small, err)
			}
			allocated[name] = n
		}
	}
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
