package transcript_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/spoolhq/spool/pkg/transcript"
)

// real returns a transcript that an agent's own command line wrote (Claude Code 2.1.197, Codex 0.169.0, OpenCode
// 1.18.33). Long texts are shortened.
func real(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestCheck_AcceptsRealTranscripts reads each transcript at once and byte by byte: the result must not depend on the
// size of reads.
func TestCheck_AcceptsRealTranscripts(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]transcript.Info{
		"claude.jsonl":  {Architecture: "claude-code", AgentSessionID: "920a1c81-e761-46bf-9934-aa4d9a0c5d7a", Messages: 5},
		"codex.jsonl":   {Architecture: "codex", AgentSessionID: "01a20736-38c3-7771-b324-458ef2889909", Messages: 5},
		"opencode.json": {Architecture: "opencode", AgentSessionID: "ses_df8c9bf3fffefIBuHcv7LM9y7b", Messages: 5},
	} {
		raw := real(t, name)
		for how, r := range map[string]io.Reader{
			"at once": bytes.NewReader(raw), "byte by byte": iotest.OneByteReader(bytes.NewReader(raw)),
			"without the last newline": bytes.NewReader(bytes.TrimRight(raw, "\n")),
		} {
			if got, err := transcript.Check(r); err != nil || got != want {
				t.Errorf("%s, %s: %+v, %v, want %+v", name, how, got, err, want)
			}
		}
	}
}

// TestCheck_RefusesEveryTruncation cuts real transcripts after each byte, and long ones after each seventh byte.
// Check refuses the rest unless it ends with a complete line.
func TestCheck_RefusesEveryTruncation(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"claude.jsonl", "codex.jsonl", "opencode.json"} {
		raw := real(t, name)
		step := 1
		if len(raw) > 10_000 {
			step = 7
		}
		for n := 0; n < len(raw); n += step {
			_, err := transcript.Check(bytes.NewReader(raw[:n]))
			whole := n > 0 && (raw[n] == '\n' || raw[n-1] == '\n') && name != "opencode.json" || n == len(bytes.TrimRight(raw, "\n"))
			var refused *transcript.Error
			if err == nil && !whole || err != nil && !errors.As(err, &refused) {
				t.Fatalf("%s, the first %d of %d bytes: %v", name, n, len(raw), err)
			}
		}
	}
}

const (
	user      = `{"type":"user","uuid":"94978bdd-b004-4253-91c5-4317af92d603","parentUuid":null,"sessionId":"920a1c81-e761-46bf-9934-aa4d9a0c5d7a","message":{"role":"user","content":"hello"}}`
	assistant = `{"type":"assistant","uuid":"6b5793da-9a4d-4c35-904c-d6ab7f8ffb78","parentUuid":"94978bdd-b004-4253-91c5-4317af92d603","sessionId":"920a1c81-e761-46bf-9934-aa4d9a0c5d7a","message":{"role":"assistant","content":[{"type":"text","text":"Hello."}]}}`
	meta      = `{"type":"session_meta","payload":{"id":"01a20736-38c3-7771-b324-458ef2889909"}}`
	item      = `{"type":"response_item","payload":{"type":"message","role":"user","content":[]}}`
	export    = `{"info":{"id":"ses_1"},"messages":[{"info":{"id":"msg_1","sessionID":"ses_1","role":"user"},"parts":[{"id":"prt_1","messageID":"msg_1","sessionID":"ses_1"}]}]}`
)

func TestCheck_NamesTheInvalidLine(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 250) + strings.Repeat("]", 250)
	for name, c := range map[string]struct {
		text string
		line int
		says string
	}{
		"empty":                           {"", 0, "is empty"},
		"blank lines":                     {"\n\n", 0, "must be a transcript of Claude Code"},
		"a picture":                       {"\x89PNG\r\n\x1a\n\x00\x00", 0, "must be a transcript of Claude Code"},
		"another tool's lines":            {`{"role":"user","content":"hello"}`, 0, `unknown member "role"`},
		"another tool's list":             {`[{"role":"user"}]`, 0, "must be a transcript of Claude Code"},
		"a number":                        {"42", 0, "must be a transcript of Claude Code"},
		"a cut line":                      {user + "\n" + assistant[:50], 2, "cut off"},
		"a line in the middle":            {user + "\n{\n" + assistant, 2, "must be a JSON object"},
		"another form's line":             {user + "\n" + meta, 0, ""},
		"no UTF-8":                        {strings.Replace(user, "hello", "\xff", 1), 1, "UTF-8"},
		"deep":                            {user + "\n" + strings.Replace(assistant, `"Hello."`, deep, 1), 2, "deeper than 200"},
		"deep in the first line":          {strings.Replace(user, `"hello"`, deep, 1), 0, "deeper than 200"},
		"deep and unclosed":               {strings.Repeat(`{"info":`, 100_000), 0, "deeper than 200"},
		"a session id that is a path":     {strings.Replace(user, "920a1c81-e761-46bf-9934-aa4d9a0c5d7a", "../../../etc/passwd", 1), 1, "sessionId must be a UUID"},
		"a uuid that is none":             {strings.Replace(user, "94978bdd-", "x", 1), 1, "uuid must be a UUID"},
		"a parent that is none":           {strings.Replace(user, "null", `"x"`, 1), 1, "parentUuid must be null"},
		"a parent that is missing":        {assistant, 1, "part of the transcript is missing"},
		"no uuid":                         {strings.Replace(user, `"uuid"`, `"id"`, 1), 1, "uuid is missing"},
		"another role":                    {strings.Replace(user, `"role":"user"`, `"role":"system"`, 1), 1, "message.role"},
		"no content":                      {strings.Replace(user, `"hello"`, `7`, 1), 1, "message.content"},
		"notes alone":                     {`{"type":"summary","sessionId":"920a1c81-e761-46bf-9934-aa4d9a0c5d7a"}`, 0, "no messages"},
		"codex: no beginning":             {item, 1, "beginning of the transcript is missing"},
		"codex: an id that is a path":     {strings.Replace(meta, "01a20736", "../../..", 1), 1, "payload.id must be a UUID"},
		"codex: no payload":               {meta + "\n" + `{"type":"response_item","payload":1}`, 2, "payload must be a JSON object"},
		"codex: nothing said":             {meta, 0, "no messages"},
		"opencode: cut":                   {export[:len(export)-1], 1, "cut off"},
		"opencode: cut in a message":      {export[:80], 1, "cut off"},
		"opencode: more":                  {export + "{}", 1, "data after the end"},
		"opencode: no UTF-8":              {strings.Replace(export, "msg_1", "\xc3\x28", 1), 0, "UTF-8"},
		"opencode: id that is a path":     {strings.Replace(export, "ses_1", "ses_/../..", 1), 0, "info.id"},
		"opencode: another session":       {strings.Replace(export, `"sessionID":"ses_1"`, `"sessionID":"ses_2"`, 1), 1, "another session"},
		"opencode: a part of another":     {strings.Replace(export, `"messageID":"msg_1"`, `"messageID":"msg_2"`, 1), 1, "ids of a part"},
		"opencode: an answer to nothing":  {strings.Replace(export, `"role":"user"`, `"role":"assistant","parentID":"msg_0"`, 1), 1, "part of the transcript is missing"},
		"opencode: messages without info": {`{"messages":[]}`, 0, "info must come before"},
		"opencode: nothing said":          {`{"info":{"id":"ses_1"},"messages":[]}`, 0, "no messages"},
		"opencode: a list of nothing":     {`{"info":{"id":"ses_1"},"messages":[null]}`, 1, "must be a JSON object"},
	} {
		_, err := transcript.Check(strings.NewReader(c.text))
		var refused *transcript.Error
		switch {
		case c.says == "": // lines of other types are allowed between those of a conversation
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case !errors.As(err, &refused) || refused.Line != c.line || !strings.Contains(refused.Detail, c.says):
			t.Errorf("%s: %v, want line %d with %q", name, err, c.line, c.says)
		}
	}
}

// endless is a line, or a text, that does not end.
type endless struct {
	head string
	read int64
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.head)
	e.head = e.head[n:]
	for i := n; i < len(p); i++ {
		p[i] = 'x'
	}
	e.read += int64(len(p))
	return len(p), nil
}

// TestCheck_HoldsNoMoreThanALine tests lines and texts that do not end: Check stops reading soon after the limit.
func TestCheck_HoldsNoMoreThanALine(t *testing.T) {
	t.Parallel()
	for name, head := range map[string]string{
		"first line": "", "a line of Claude Code": user + "\n{\"a\":\"", "a line of Codex": meta + "\n{\"a\":\"",
		"info of OpenCode": "{\n\"info\":{\"a\":\"", "a message of OpenCode": "{\n\"info\":{\"id\":\"ses_1\"},\"messages\":[{\"parts\":[{\"a\":\"", "a key of OpenCode": "{\n\"", "a number of OpenCode": "{\n\"info\":",
	} {
		e := &endless{head: head}
		_, err := transcript.Check(e)
		var refused *transcript.Error
		if !errors.As(err, &refused) || e.read > 2*transcript.MaxLineLength {
			t.Errorf("%s: %v after %d bytes", name, err, e.read)
		}
	}
}

// repeated is a transcript of valid lines that does not end.
type repeated struct {
	head, line string
	at         int
}

func (r *repeated) Read(p []byte) (int, error) {
	n := copy(p, r.head)
	r.head = r.head[n:]
	for n < len(p) {
		c := copy(p[n:], r.line[r.at:])
		n, r.at = n+c, (r.at+c)%len(r.line)
	}
	return n, nil
}

// TestCheck_MemoryDoesNotGrow reads 100 MB that are one line, and 100 MB that are one message.
func TestCheck_MemoryDoesNotGrow(t *testing.T) {
	for name, r := range map[string]*repeated{
		"codex":    {head: meta + "\n", line: `{"type":"response_item","payload":{"type":"message","role":"user","content":"` + strings.Repeat("x", 1000) + "\"}}\n"},
		"opencode": {head: "{\n\"info\":{\"id\":\"ses_1\"},\"messages\":[", line: `{"info":{"id":"msg_1","sessionID":"ses_1","role":"user"},"parts":[],"x":"` + strings.Repeat("x", 1000) + `"},`},
	} {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		if _, err := transcript.Check(io.LimitReader(r, 100<<20)); err == nil {
			t.Errorf("%s: a transcript that is cut off was accepted", name)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 64<<20 {
			t.Errorf("%s: the heap has grown by %d bytes", name, grown)
		}
	}
}

func TestCheck_ReturnsTheReadersError(t *testing.T) {
	t.Parallel()
	gone := errors.New("gone")
	for _, head := range []string{"", user + "\n", export[:60]} {
		if _, err := transcript.Check(io.MultiReader(strings.NewReader(head), iotest.ErrReader(gone))); !errors.Is(err, gone) {
			t.Errorf("after %q: %v", head, err)
		}
	}
}

// FuzzCheck starts with short transcripts of each form. With the files of testdata, go test needed up to a minute for
// each new input, because the time to minimize an input grows with the square of its length.
func FuzzCheck(f *testing.F) {
	for _, seed := range []string{user, user + "\n" + assistant, meta + "\n" + item, export} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		info, err := transcript.Check(bytes.NewReader(raw))
		var refused *transcript.Error
		if err != nil && !errors.As(err, &refused) {
			t.Errorf("%v", err)
		}
		if err == nil && (info.AgentSessionID == "" || strings.ContainsAny(info.AgentSessionID, "/.\x00") || info.Messages == 0) {
			t.Errorf("accepted with %+v", info)
		}
	})
}
