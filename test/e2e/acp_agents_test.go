package e2e

import (
	"bytes"
	"crypto/rand"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// acpAgents returns the session options of agents that speak ACP, by the name of the test case. "qwen" and "claude"
// come from scripts/acp-agents. Each uses the API of another model provider.
func acpAgents() map[string]map[string]any {
	return map[string]map[string]any{
		"qwen":     {"command": []string{"qwen", "--acp"}, "modelSettings": map[string]any{"preset": "qwen"}},
		"claude":   {"command": []string{"claude-code-acp"}, "modelSettings": map[string]any{"preset": "claude"}},
		"opencode": {"command": []string{"opencode", "acp"}, "modelSettings": map[string]any{"preset": "opencode"}},
		"arguments and a variable in place of a preset": {"command": []string{"qwen"}, "modelSettings": map[string]any{
			"args": []string{"--acp", "--auth-type", "openai", "--model", "${MODEL}", "--openai-base-url", "${MODEL_BASE_URL}"},
			"env":  map[string]string{"OPENAI_API_KEY": "${MODEL_KEY}"},
		}},
	}
}

// acpPath returns a PATH that has the ACP agents and OpenCode. It skips the test if they are not installed.
func acpPath(t *testing.T) string {
	t.Helper()
	path := []string{os.Getenv("PATH")}
	for _, folder := range []string{"agents", "acp-agents"} {
		dir, err := filepath.Abs("../../.tools/" + folder + "/node_modules/.bin")
		if err != nil {
			t.Fatal(err)
		}
		if dir, err = filepath.EvalSymlinks(dir); err != nil {
			t.Skipf("the ACP agents are not installed: run scripts/install: %v", err)
		}
		path = append([]string{dir}, path...)
	}
	return strings.Join(path, string(os.PathListSeparator))
}

// modelKey is the key that the model server of TestModelSettings_ReachACPAgents requires.
const modelKey = "heron-4410-model-key"

// requireKey returns the URL of a server that forwards requests with the key to a model server and refuses all others.
func requireKey(t *testing.T, model, key string) string {
	t.Helper()
	to, err := url.Parse(model)
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(to)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+key && r.Header.Get("X-Api-Key") != key {
			http.Error(w, `{"error": {"type": "authentication_error", "message": "wrong key"}}`, http.StatusUnauthorized)
			return
		}
		forwardWhole(pass, w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// forwardWhole forwards a request after it has read the whole body. When the answer begins, the server may close the
// body of the request. The transport would then fail to read to its end, and would break off the answer.
func forwardWhole(to http.Handler, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	to.ServeHTTP(w, r)
}

// TestModelSettings_ReachACPAgents tests that an ACP agent requests the session's model at the executor's base URL
// and with its key. The agent has only the model settings of the session or of its definition: the workspace stays
// empty. Both turns belong to one conversation.
func TestModelSettings_ReachACPAgents(t *testing.T) {
	c := harness.New(t, harness.Options{
		Script: script(t, "docker.yaml"), Path: acpPath(t),
		ModelKey: modelKey, ModelURL: func(url string) string { return requireKey(t, url, modelKey) },
	})
	for name, options := range acpAgents() {
		t.Run(name, func(t *testing.T) {
			before := len(c.Model.Requests())
			architecture, session := "acp", map[string]any{"model": "known-model", "sessionOptions": options}
			if name == "claude" { // the settings are those of an agent's definition
				architecture, session = "", map[string]any{"agent": "writer"}
				apply(c, "agents", "writer", map[string]any{"architecture": "acp", "model": "known-model", "command": options["command"], "modelSettings": options["modelSettings"], "instructions": "You answer what you are asked."})
			}
			k := newTalkWith(t, c, architecture, session)
			k.mustAnswer("Remember the number 4711", "I will remember 4711.")
			k.mustAnswer("which number was it?", "You asked me to remember 4711.")
			asked := slices.DeleteFunc(c.Model.Requests()[before:], func(r server.RecordedRequest) bool { return r.Method != http.MethodPost })
			if len(asked) < 2 {
				t.Errorf("the model received %d requests, want at least one for each turn", len(asked))
			}
			for _, r := range asked {
				if r.Model != "known-model" {
					t.Errorf("%s %s: model %q, want known-model", r.Method, r.URL, r.Model)
				}
			}
			if files, err := os.ReadDir(c.WorkspaceFolder(k.session)); err != nil || len(files) > 0 {
				t.Errorf("the workspace has %v, %v; want nothing in it", files, err)
			}
		})
	}
	t.Run("without settings the agent has no model", func(t *testing.T) {
		k := newTalkWith(t, c, "acp", map[string]any{"model": "known-model", "sessionOptions": map[string]any{"command": []string{"qwen", "--acp"}}})
		k.mustFail("Remember the number 4711", "MODEL_UNAUTHORIZED", "Authentication required")
	})
	t.Run("a wrong key is refused", func(t *testing.T) {
		k := newTalkWith(t, c, "acp", map[string]any{"model": "known-model", "sessionOptions": map[string]any{
			"command": []string{"opencode", "acp"}, "modelSettings": map[string]any{"preset": "opencode", "env": map[string]string{"OPENAI_API_KEY": "not-${MODEL_KEY}"}},
		}})
		ended[events.ExecutionFailed](k.ask("Remember the number 4711"))
	})
}

// mustAnswer posts a text and checks that the answer contains want. Not every ACP agent reports its usage.
func (k *talk) mustAnswer(text, want string) {
	k.t.Helper()
	x := k.ask(text)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, want) {
		k.t.Fatalf("%s: answered %q, want %q in it", text, end.Result, want)
	}
}

// acpImage builds an image of sandboxes with this machine's Node and the agents of scripts/acp-agents, like the
// Dockerfile of docs/agents.md, which uses a registry.
func acpImage(t *testing.T) string {
	t.Helper()
	harness.NeedDocker(t)
	agents, err := filepath.EvalSymlinks("../../.tools/acp-agents")
	if err != nil {
		t.Skipf("the ACP agents are not installed: run scripts/install: %v", err)
	}
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("there is no Node: install nodejs")
	}
	if node, err = filepath.EvalSymlinks(node); err != nil {
		t.Fatal(err)
	}
	name := "spool-test/acp:" + strings.ToLower(rand.Text()[:12])
	container := harness.RunDocker(t, "create", harness.SandboxImage)
	t.Cleanup(func() { harness.RunDocker(t, "rm", container) })
	harness.RunDocker(t, "cp", agents, container+":/opt/acp")
	harness.RunDocker(t, "cp", node, container+":/usr/local/bin/node")
	harness.RunDocker(t, "commit", "--change", "ENV PATH=/opt/acp/node_modules/.bin:/opt/agents/node_modules/.bin:/usr/local/bin:/usr/bin:/bin", container, name)
	t.Cleanup(func() { harness.RunDocker(t, "rmi", name) })
	return name
}

// TestModelSettings_ReachACPAgentsInDocker tests the same with sandboxes that have neither a network nor the key.
// Each agent, by its preset, requests the session's model from the egress proxy. The proxy adds the key, which the
// model server requires.
func TestModelSettings_ReachACPAgentsInDocker(t *testing.T) {
	image := acpImage(t)
	c := newDockerCluster(t, harness.Options{ModelURL: func(url string) string { return requireKey(t, url, harness.ModelAPIKey) }})
	for _, name := range []string{"opencode", "qwen", "claude"} {
		t.Run(name, func(t *testing.T) {
			before := len(c.Model.Requests())
			options := maps.Clone(acpAgents()[name])
			options["image"] = image
			k := newTalkWith(t, c, "acp", map[string]any{"model": "known-model", "sessionOptions": options})
			k.mustAnswer("Remember the number 4711", "I will remember 4711.")
			k.mustAnswer("which number was it?", "You asked me to remember 4711.")
			asked := slices.DeleteFunc(c.Model.Requests()[before:], func(r server.RecordedRequest) bool { return r.Method != http.MethodPost })
			if len(asked) < 2 {
				t.Errorf("the model received %d requests, want at least one for each turn", len(asked))
			}
			for _, r := range asked {
				if r.Model != "known-model" {
					t.Errorf("%s %s: model %q, want known-model", r.Method, r.URL, r.Model)
				}
			}
			container := c.SandboxContainer(k.session)
			inside := harness.RunDocker(t, "exec", container, "sh", "-c", `cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n'
grep -rlsF sk-the-real-key /home /tmp /workspace /spool && echo found; echo searched`)
			if !strings.HasSuffix(inside, "\nsearched") || !strings.Contains(inside, "known-model") || strings.Contains(inside, harness.ModelAPIKey) || strings.Contains(inside, "\nfound\n") {
				t.Errorf("the search in the sandbox found\n%s", inside)
			}
			if strings.Contains(harness.RunDocker(t, "inspect", container), harness.ModelAPIKey) {
				t.Error("the container's settings have the key")
			}
		})
	}
}
