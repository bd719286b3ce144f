package redact_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
)

const secret = `s3cr&t/ä"k` + "\n" + `y+1`

// A value is redacted in every form in which programs write it.
func TestForms_AreAllRedacted(t *testing.T) {
	t.Parallel()
	quoted := func(v any) string {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	s := redact.New(secret)
	for name, c := range map[string]struct{ text, want string }{
		"as it is":          {"key " + secret + ".", "key [redacted]."},
		"twice":             {secret + secret, "[redacted]"},
		"JSON":              {quoted(secret), `"[redacted]"`},
		"JSON in JSON":      {quoted(quoted(secret)), `"\"[redacted]\""`},
		"Python's JSON":     {`"s3cr&t/\u00e4\"k\ny+1"`, `"[redacted]"`},
		"PHP's JSON":        {`"s3cr&t\/\u00e4\"k\ny+1"`, `"[redacted]"`},
		"query":             {"?k=" + url.QueryEscape(secret) + "&x=1", "?k=[redacted]&x=1"},
		"path":              {"/" + url.PathEscape(secret) + "/x", "/[redacted]/x"},
		"query, lower case": {"?k=" + strings.ToLower(url.QueryEscape(secret)), "?k=[redacted]"},
		"hex":               {hex.EncodeToString([]byte(secret)), "[redacted]"},
		"hex, upper case":   {strings.ToUpper(hex.EncodeToString([]byte(secret))), "[redacted]"},
		"base 64":           {base64.StdEncoding.EncodeToString([]byte(secret)), "[redacted]"},
		"base 64 for URLs":  {base64.RawURLEncoding.EncodeToString([]byte(secret)), "[redacted]"},
		"a line of it":      {"first:\ns3cr&t/ä\"k\nother", "first:\n[redacted]\nother"},
		"none":              {"s3cr&t/ä\"", "s3cr&t/ä\""},
	} {
		if got := s.RedactString(c.text); got != c.want {
			t.Errorf("%s: %q became %q, want %q", name, c.text, got, c.want)
		}
	}
}

// A value is found in upper and in lower case, with escaped slashes, and with terminal escape codes in it.
func TestForms_CaseSlashesAndColours(t *testing.T) {
	t.Parallel()
	const value = "Sk-a/b~~?>Xy9c"
	base64 := base64.StdEncoding.EncodeToString([]byte("\xff\xff\xff" + value))[4:]
	if !strings.Contains(base64, "/") {
		t.Fatalf("%s has no slash", base64)
	}
	coloured := ""
	for i, c := range value {
		coloured += fmt.Sprintf("\x1b[38;5;%dm%c", i, c)
	}
	s := redact.New(value, "REDACTED-not", "rEDACTED")
	for name, c := range map[string]struct{ text, want string }{
		"upper case":                {"key " + strings.ToUpper(value) + ".", "key [redacted]."},
		"lower case":                {"key " + strings.ToLower(value) + ".", "key [redacted]."},
		"slashes":                   {"key " + strings.ReplaceAll(value, "/", `\/`) + ".", "key [redacted]."},
		"upper case and slashes":    {"key " + strings.ReplaceAll(strings.ToUpper(value), "/", `\/`) + ".", "key [redacted]."},
		"base 64 with slashes":      {strings.ReplaceAll(base64, "/", `\/`), "[redacted]"},
		"a colour at each letter":   {"key " + coloured + "\x1b[0m.", "key \x1b[38;5;0m[redacted]\x1b[0m."},
		"a part in bold":            {"key Sk-a\x1b[1m/b~~\x1b[m?>Xy9c.", "key [redacted]."},
		"a link":                    {"Sk-a\x1b]8;;http://x\x07/b~~?\x1b]8;;\x1b\\>Xy9c.", "[redacted]."},
		"a set of characters":       {"Sk-a\x1b(B/b~~?>Xy9c.", "[redacted]."},
		"a broken code":             {"Sk-a\x1b[1\n" + value + ".", "Sk-a\x1b[1\n[redacted]."},
		"a title without an end":    {"\x1b]0;x " + value + ".", "\x1b]0;x [redacted]."},
		"codes alone":               {"\x1b[1mSk-a\x1b[0m", "\x1b[1mSk-a\x1b[0m"},
		"the marker is not a value": {"[redacted]", "[redacted]"},
		"a form of the marker":      {"rEDACTED REDACTED", "[redacted] [redacted]"},
	} {
		if got := s.RedactString(c.text); got != c.want {
			t.Errorf("%s: %q became %q, want %q", name, c.text, got, c.want)
		}
	}
	if got := string(s.RedactJSON(json.RawMessage(`{"a":"Sk-a\u001b[1m/b~~?>Xy9c"}`))); got != `{"a":"[redacted]"}` {
		t.Errorf("JSON: %s", got)
	}
}

// The text that is held back for escape codes has a limit, and the time is linear in the text.
func TestStream_HoldsBackALimitedNumberOfCodes(t *testing.T) {
	t.Parallel()
	x := redact.New("secret").NewStream()
	piece := []byte("secre" + strings.Repeat("\x1b[1m", 1<<10))
	out := 0
	for range 1 << 8 {
		out += len(x.Write(piece))
	}
	if held := len(piece)<<8 - out; held > 1<<17 {
		t.Errorf("%d bytes are held back", held)
	}
}

func TestEmptySet_ChangesNothing(t *testing.T) {
	t.Parallel()
	if s := redact.New("abc", "", "redacted", redact.Marker); s != nil {
		t.Errorf("a set of %v", s)
	}
	var none *redact.Set
	if got := none.RedactString("text"); got != "text" {
		t.Errorf("became %q", got)
	}
	x := none.NewStream()
	if got := string(x.Write([]byte("te"))) + string(x.Close()); got != "te" {
		t.Errorf("became %q", got)
	}
}

func TestWith_AddsValues(t *testing.T) {
	t.Parallel()
	one := redact.New("first")
	if one.WithValues([]string{"first"}) != one {
		t.Error("a set is made anew for what it has")
	}
	both := one.WithValues([]string{"second"})
	if got := both.RedactString("first and second"); got != "[redacted] and [redacted]" {
		t.Errorf("became %q", got)
	}
	if got := one.RedactString("second"); got != "second" {
		t.Errorf("the set before has changed: %q", got)
	}
	var none *redact.Set
	if got := none.WithValues([]string{"first"}).RedactString("first"); got != redact.Marker {
		t.Errorf("became %q", got)
	}
}

func TestStreamHoldsBackNoMoreThanItMust(t *testing.T) {
	t.Parallel()
	x := redact.New("secret").NewStream()
	var got []string
	for _, piece := range []string{"a se", "c", "ond secre", "t", "s", ""} {
		got = append(got, string(x.Write([]byte(piece))))
	}
	got = append(got, string(x.Close()))
	if want := []string{"a ", "", "second ", "[redacted]", "", "", "s"}; !slices.Equal(got, want) {
		t.Errorf("came as %q, want %q", got, want)
	}
}

// The text has a suffix of one pattern that is a prefix of another, a pattern inside a pattern, and adjacent patterns.
func TestOverlaps_AreRedactedOnce(t *testing.T) {
	t.Parallel()
	s := redact.New("abcd", "cdef", "bcde", "xxxx", "abcdefgh")
	for text, want := range map[string]string{
		"abcdef": "[redacted]", "_abcdefg": "_[redacted]g", "abcdefgh": "[redacted]", "xxxxx_xxx": "[redacted]_xxx", "abcdxxxx": "[redacted]", "abc cdef": "abc [redacted]",
	} {
		if got := s.RedactString(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}

// naive redacts by searching at every position.
func naive(text string, values []string) string {
	gone := make([]bool, len(text))
	for _, v := range values {
		for i := range len(text) {
			if strings.HasPrefix(text[i:], v) {
				for k := range len(v) {
					gone[i+k] = true
				}
			}
		}
	}
	var out strings.Builder
	for i := range len(text) {
		switch {
		case !gone[i]:
			out.WriteByte(text[i])
		case i == 0 || !gone[i-1]:
			out.WriteString(redact.Marker)
		}
	}
	return out.String()
}

// check checks the redaction of a text, split at the given positions.
func check(t interface{ Fatalf(string, ...any) }, values []string, text string, splits []int) {
	s := redact.New(values...)
	whole := s.RedactString(text)
	x := s.NewStream()
	var joined strings.Builder
	rest := text
	for _, n := range splits {
		n = min(n, len(rest))
		joined.Write(x.Write([]byte(rest[:n])))
		rest = rest[n:]
	}
	joined.Write(x.Write([]byte(rest)))
	joined.Write(x.Close())
	if joined.String() != whole {
		t.Fatalf("%q split at %v became %q, as a whole %q (values %q)", text, splits, joined.String(), whole, values)
	}
	for _, piece := range strings.Split(whole, redact.Marker) {
		for _, v := range values {
			if len(v) >= redact.MinValueLength && !strings.Contains(redact.Marker, v) && strings.Contains(piece, v) {
				t.Fatalf("%q became %q: %q is still there", text, whole, v)
			}
		}
	}
}

func FuzzStream(f *testing.F) {
	f.Add("secret", "ecre", "a secret secre", []byte{3, 1, 2})
	f.Add(secret, "s3cr", secret+secret, []byte{1, 1, 1})
	f.Add("aaaa", "aaab", "aaaaaaaaab", []byte{0, 5})
	f.Add("secret", "\x1b[1mx", "sec\x1b[1mret\x1b]0;t\x07\x1b", []byte{4, 1, 1, 2})
	f.Fuzz(func(t *testing.T, one, two, text string, splits []byte) {
		var at []int
		for _, n := range splits {
			at = append(at, int(n))
		}
		check(t, []string{one, two}, text, at)
		check(t, []string{one, two}, text+one+two+text, at)
	})
}

// A text of few letters, which has many prefixes, suffixes and overlaps, is redacted the same way in pieces and as a
// whole.
func TestStreamIsTheWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		letters := rapid.SampledFrom([]rune("abä"))
		codes := rapid.SampledFrom([]rune("abä\x1b[m]\x07"))
		values := rapid.SliceOfN(rapid.StringOfN(letters, 4, 9, -1), 1, 4).Draw(t, "values")
		text := rapid.StringOfN(letters, 0, 60, -1).Draw(t, "text")
		check(t, values, text, rapid.SliceOf(rapid.IntRange(0, 7)).Draw(t, "splits"))
		if got, want := redact.New(values...).RedactString(text), naive(text, values); got != want {
			t.Fatalf("%q became %q, want %q (values %q)", text, got, want, values)
		}
		check(t, values, rapid.StringOfN(codes, 0, 60, -1).Draw(t, "coded"), rapid.SliceOf(rapid.IntRange(0, 7)).Draw(t, "splits of it"))
	})
}

// In the encoding of a longer text, only the characters at the ends of the value remain, which also depend on the bytes
// around it.
func TestBase64AtAnyPlace(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		value := string(rapid.SliceOfN(rapid.Byte(), 4, 40).Draw(t, "value"))
		before := rapid.SliceOfN(rapid.Byte(), 0, 10).Draw(t, "before")
		after := rapid.SliceOfN(rapid.Byte(), 0, 10).Draw(t, "after")
		whole := slices.Concat(before, []byte(value), after)
		for name, e := range map[string]*base64.Encoding{
			"std": base64.StdEncoding, "url": base64.URLEncoding, "raw": base64.RawStdEncoding, "raw url": base64.RawURLEncoding,
		} {
			text := e.EncodeToString(whole)
			got := redact.New(value).RedactString(text)
			head, tail, ok := strings.Cut(got, redact.Marker)
			if !ok {
				t.Fatalf("%s: %q is not found in %q", name, value, text)
			}
			if len(head) > len(before)*8/6+1 || len(strings.TrimRight(tail, "=")) > len(after)*8/6+2 {
				t.Fatalf("%s: of %q is left %q (%d bytes before, %d after)", name, text, got, len(before), len(after))
			}
		}
	})
}

func TestJSON_RedactsStringsAndNumbers(t *testing.T) {
	t.Parallel()
	s := redact.New(secret, "12345", `{"key":1}`)
	for in, want := range map[string]string{
		`{"a":"` + `x"}`:                         `{"a":"x"}`,
		`{"n":12345,"m":-0.123456e7,"o":1234}`:   `{"n":"[redacted]","m":"[redacted]","o":1234}`,
		`{"12345":[true,null,"a 12345 b"]}`:      `{"[redacted]":[true,null,"a [redacted] b"]}`,
		`{"credentials":{"key":1}}`:              `"[redacted]"`,
		`{"s":"s3cr&t/\u00e4\"k\ny+1 \u00e9\\"}`: `{"s":"[redacted] é\\"}`,
		`"no \" end`:                             `"no \" end`,
		``:                                       ``,
	} {
		if got := string(s.RedactJSON(json.RawMessage(in))); got != want {
			t.Errorf("%s became %s, want %s", in, got, want)
		}
	}
}

func TestJSONStaysValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.StringN(4, 8, -1), 1, 3).Draw(t, "values")
		texts := rapid.SliceOf(rapid.OneOf(rapid.String(), rapid.SampledFrom(values))).Draw(t, "texts")
		doc := map[string]any{}
		for i, x := range texts {
			doc[fmt.Sprintf("k%d", i)] = []any{x, map[string]any{x + x: i}}
		}
		raw, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		out := redact.New(values...).RedactJSON(raw)
		var back any
		if err := json.Unmarshal(out, &back); err != nil {
			t.Fatalf("%s became %s: %v", raw, out, err)
		}
		var look func(any)
		look = func(v any) {
			switch v := v.(type) {
			case string:
				check(t, values, v, nil)
				if redact.New(values...).RedactString(v) != v {
					t.Fatalf("%s became %s, with %q in it", raw, out, v)
				}
			case []any:
				for _, e := range v {
					look(e)
				}
			case map[string]any:
				for k, e := range v {
					look(k)
					look(e)
				}
			}
		}
		look(back)
	})
}

type kind string

type leaf struct {
	Text  string
	Kind  kind
	Raw   json.RawMessage
	Bytes []byte
}

func TestValue_RedactsStringsAtAnyDepth(t *testing.T) {
	t.Parallel()
	type tree struct {
		ID    string
		Leaf  leaf
		Ptr   *string
		Leafs []leaf
		Map   map[string]any
		Time  time.Time
		None  *leaf
	}
	text := "a secret"
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	in := tree{
		ID: "secret", Leaf: leaf{Text: text, Kind: "secret", Raw: json.RawMessage(`{"x":"secret"}`), Bytes: []byte("secret")}, Ptr: &text,
		Leafs: []leaf{{Text: text}}, Map: map[string]any{"secret": []string{text}}, Time: at,
	}
	out := redact.RedactFields(redact.New("secret"), in, "ID")
	raw, err := json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"ID":"secret","Leaf":{"Text":"a [redacted]","Kind":"secret","Raw":{"x":"[redacted]"},"Bytes":"c2VjcmV0"},"Ptr":"a [redacted]",` +
		`"Leafs":[{"Text":"a [redacted]","Kind":"","Raw":null,"Bytes":null}],"Map":{"[redacted]":["a [redacted]"]},"Time":"2026-01-02T03:04:05Z","None":null}`
	if string(raw) != want {
		t.Errorf("became\n%s, want\n%s", raw, want)
	}
	if in.Leaf.Text != text || in.Leafs[0].Text != text || *in.Ptr != text || string(in.Leaf.Raw) != `{"x":"secret"}` || in.Map["secret"] == nil {
		t.Errorf("the original has changed: %+v", in)
	}
}

// The time grows with the text, and not with the number of values or of partial matches.
func TestManyValues_TakeLinearTime(t *testing.T) {
	t.Parallel()
	var values []string
	for i := range 500 {
		values = append(values, strings.Repeat("a", i%50+4)+fmt.Sprint(i))
	}
	s := redact.New(values...)
	text := strings.Repeat("a", 1<<20)
	if got := s.RedactString(text + values[0]); !strings.HasSuffix(got, redact.Marker) {
		t.Errorf("ends in %q", got[len(got)-20:])
	}
}
