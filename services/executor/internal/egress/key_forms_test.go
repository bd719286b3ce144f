package egress_test

import (
	"encoding/json"
	"io"
	"net/http"
	"testing"
)

// Servers differ in whether they tell apart keys that differ only in case or in their Unicode form, and which of two equal keys they
// take. The proxy refuses each body that they would read differently.
func TestModelBody_RefusesKeysThatSomeServersReadAsEqual(t *testing.T) {
	t.Parallel()
	change, asked := answering(t)
	w := newWorld(t, change)
	for name, c := range map[string]struct{ path, body string }{
		"the type of a tool, and another case after it":  {messages, `{"model":"m","tools":[{"type":"web_fetch_20250910","name":"w","Type":"custom"}]}`},
		"the type of a tool, and another case before it": {messages, `{"model":"m","tools":[{"TYPE":"custom","name":"w","type":"web_fetch_20250910"}]}`},
		"the type of a tool in another case alone":       {messages, `{"model":"m","tools":[{"Type":"custom","name":"w"}]}`},
		"a long s":                            {responses, `{"model":"m","input":"x","tools":[],"tool\u017f":[{"type":"web_search"}]}`},
		"full-width letters":                  {responses, `{"model":"m","input":"x","tools":[{"type":"web_search","ｔｙｐｅ":"function"}]}`},
		"a zero-width space":                  {messages, "{\"model\":\"m\",\"tools\":[{\"ty\u200bpe\":\"custom\",\"type\":\"web_fetch_20250910\"}]}"},
		"a NUL byte":                          {messages, `{"model":"m","tools":[{"type\u0000":"custom","type":"bash_20250124","name":"b"}]}`},
		"the tools of a request":              {messages, `{"model":"m","tools":[],"Tools":[{"type":"custom","name":"c"}]}`},
		"the choice of a tool":                {messages, `{"model":"m","tool_choice":{"type":"auto","Type":"any"}}`},
		"the choice of a tool, other fields":  {responses, `{"model":"m","input":"x","tool_choice":{"mode":"auto","MODE":"required"}}`},
		"an unknown field":                    {messages, `{"model":"m","new_field":1,"New_Field":2}`},
		"composed and decomposed letters":     {messages, `{"model":"m","x":{"\u00e9":1,"e\u0301":2}}`},
		"the type of a message's block":       {messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x","Type":"image"}]}]}`},
		"the type of a source":                {messages, `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","data":"AA==","tYPE":"base64"}}]}]}`},
		"the type of an item":                 {responses, `{"model":"m","input":[{"type":"message","role":"user","content":"x","Type":"item_reference"}]}`},
		"the role of a message":               {chat, `{"model":"m","messages":[{"role":"user","content":"x","Role":"system"}]}`},
		"the environment of a shell tool":     {responses, `{"model":"m","input":"x","tools":[{"type":"shell","environment":{"type":"local","Type":"container_auto"}}]}`},
		"the model of a request":              {chat, `{"model":"m","Model":"gpt-4o-search-preview","messages":[]}`},
		"a tool in the items of another tool": {responses, `{"model":"m","input":"x","tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f","Type":"mcp"}]}]}`},
	} {
		// The entry keeps the tool itself from being what is denied.
		b := w.box("provider:web_fetch", "provider:web_search", "provider:shell", "provider:mcp", "provider:stored")
		status, header, answer := b.post(c.path, c.body)
		if status != http.StatusForbidden || header.Get("Spool-Egress") != "UNREADABLE_BODY" {
			t.Errorf("%s: %d %s", name, status, answer)
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("%d requests got to the provider", n)
	}
}

// The keys of a schema, of a tool's input and of arguments belong to the client: a pair that differs in case is legitimate there.
func TestModelBody_KeysOfSchemasAndInputsAreFree(t *testing.T) {
	t.Parallel()
	change, _ := answering(t)
	w := newWorld(t, change)
	const pair = `{"Type":"a","type":"b","ID":1,"id":2,"\u017f":1,"s":2,"é":{"e\u0301":1,"\u00e9":2}}`
	for _, c := range []struct{ path, body string }{
		{messages, `{"model":"m","tools":[{"name":"t","input_schema":{"type":"object","properties":` + pair + `}}],
			"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"t","input":` + pair + `}]}]}`},
		{responses, `{"model":"m","input":[{"type":"tool_search_call","call_id":"c","arguments":` + pair + `},{"type":"custom_tool_call","input":` + pair + `}],
			"tools":[{"type":"function","name":"f","parameters":{"properties":` + pair + `}}]}`},
		{chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":` + pair + `}}}]}`},
	} {
		if status, _, answer := w.box().post(c.path, c.body); status != http.StatusOK {
			t.Errorf("%s %s: %d %s", c.path, c.body, status, answer)
		}
	}
}

// The account of a request, and the way its body is decoded, are the operator's to choose.
func TestModelRequest_HeadersOfTheAccountAreRemoved(t *testing.T) {
	t.Parallel()
	got := make(chan http.Header, 1)
	w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Clone()
		_, _ = io.WriteString(w, "{}")
	}))
	b := w.box()
	for _, path := range []string{messages, responses, chat, "/nvidia/chat/completions"} {
		req := request(t, t.Context(), path, `{"model":"m"}`)
		foreign := []string{"Openai-Organization", "Openai-Project", "OpenAI_Organization", "openai_project", "X_Api_Key", "Anthropic-Workspace-Id", "X-Http-Method-Override"}
		for _, name := range foreign {
			req.Header[name] = []string{"foreign"} // set directly, because Set changes the spelling
		}
		req.Header["Content-Type"] = []string{"application/json; charset=utf-7", "text/plain"}
		req.Header.Set("Openai-Beta", "kept")
		if status, _, body := b.do(req); status != http.StatusOK {
			t.Fatal(path, status, body)
		}
		h := <-got
		for name, values := range h {
			for _, v := range values {
				if v == "foreign" {
					t.Errorf("%s: header %s arrived", path, name)
				}
			}
		}
		if kind := h.Values("Content-Type"); len(kind) != 1 || kind[0] != "application/json" || h.Get("Openai-Beta") != "kept" {
			t.Errorf("%s: %v", path, h)
		}
	}
}

// The keys of a pair are equal for Go's own decoder, which the attack relies on.
func TestEncodingJSON_ReadsKeysOfAnotherCase(t *testing.T) {
	t.Parallel()
	var tool struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal([]byte(`{"type":"web_fetch_20250910","Type":"custom"}`), &tool); err != nil || tool.Type != "custom" {
		t.Errorf("%q, %v", tool.Type, err)
	}
}
