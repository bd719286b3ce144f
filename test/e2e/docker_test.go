package e2e

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// newDockerCluster returns a cluster whose sandboxes are containers.
func newDockerCluster(t *testing.T, opts harness.Options) *harness.Cluster {
	t.Helper()
	harness.NeedDocker(t)
	opts.Docker = true
	opts.Script = script(t, "docker.yaml")
	return harness.New(t, opts)
}

// architectures returns the session options of every architecture that uses a model.
func architectures() map[string]map[string]any {
	return map[string]map[string]any{
		"claude-code": {"model": "known-model"},
		"codex":       {"model": "gpt-5.5"},
		"opencode":    {"model": "known-model"},
		// any agent that speaks the protocol, with the user's own configuration
		"acp": {
			"model":          "mock/known-model",
			"sessionOptions": map[string]any{"command": []string{"opencode", "acp"}},
			"workspaceFiles": []map[string]any{{"path": "opencode.json", "content": `{"provider": {"mock": {"npm": "@ai-sdk/openai-compatible",
				"options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}, "models": {"known-model": {}}}}, "small_model": "mock/known-model"}`}},
		},
		"spool": {"model": "known-model"},
	}
}

// TestDocker_RunsEveryAgent tests every agent in a hardened container without a network, through the API of clients.
func TestDocker_RunsEveryAgent(t *testing.T) {
	c := newDockerCluster(t, harness.Options{Executors: 2, Executor: executor.Config{Slots: 4}})
	for architecture, more := range architectures() {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			dockerTalk(t, c, architecture, more)
		})
	}
}

// TestDocker_NVIDIAAsTheOnlyProvider tests that sessions that name neither a model nor its provider use NVIDIA's API
// if no other provider is configured. The executor does not have the key.
func TestDocker_NVIDIAAsTheOnlyProvider(t *testing.T) {
	t.Parallel()
	c := newDockerCluster(t, harness.Options{NVIDIAAlone: true, Executor: executor.Config{Slots: 2, NVIDIAModel: "known-model"}})
	for _, architecture := range []string{"spool", "opencode"} {
		newTalkWith(t, c, architecture, nil).mustComplete("Remember the number 4711", "I will remember 4711.")
	}
}

// dockerTalk runs a session: two turns in one process, an edit, an interrupt, an error of the model, then the idle
// timeout, and the same files in another sandbox.
func dockerTalk(t *testing.T, c *harness.Cluster, architecture string, more map[string]any) {
	k := newTalkWith(t, c, architecture, more)
	first := k.mustComplete("Remember the number 4711", "I will remember 4711.")
	if s := first.started(); s.Warm || s.Attempt != 1 {
		t.Errorf("the first start was %+v", s)
	}
	second := k.mustComplete("which number was it?", "You asked me to remember 4711.")
	second.checkSameProcess(first)
	k.mustComplete("write a file", "The file is written.")
	k.awaitFile("hello.txt", "hello, world\n")
	k.dockerInterrupt().checkSameProcess(first)
	k.dockerRefused(architecture)
	container := k.c.SandboxContainer(k.session)
	k.idle()
	harness.Eventually(t, "the container of an idle session is gone", func() bool {
		return harness.RunDocker(t, "ps", "-aq", "--no-trunc", "--filter", "id="+container) == ""
	})
	k.mustComplete("run the command cat hello.txt", "hello, world")
	back := k.mustComplete("which number was it?", "You asked me to remember 4711.")
	if s := back.started(); s.Attempt != 1 {
		t.Errorf("in the new sandbox the agent started as %+v", s)
	}
}

// awaitFile waits until the last snapshot has a file with the given content.
func (k *talk) awaitFile(path, content string) {
	k.t.Helper()
	harness.Eventually(k.t, path+" can be fetched", func() bool {
		res, err := http.Get(k.c.URL(0) + "/api/sessions/" + k.session + "/files/" + path)
		if err != nil {
			k.t.Fatal(err)
		}
		defer res.Body.Close() //nolint:errcheck // the body is read
		raw, err := io.ReadAll(res.Body)
		return err == nil && res.StatusCode == http.StatusOK && string(raw) == content
	})
}

// dockerInterrupt interrupts an answer, and checks that the next turn is answered.
func (k *talk) dockerInterrupt() turn {
	k.t.Helper()
	execution := k.post("talk for ever", func(w events.WireEvent) bool { return w.Type != events.TextDelta })
	k.c.Call(0, "POST", "/api/sessions/"+k.session+"/interrupt", map[string]any{}, nil)
	x := k.until(execution)
	if end := ended[events.ExecutionCancelled](x); end.Reason != "interrupted" {
		k.t.Errorf("ended with %+v", end)
	}
	return k.mustComplete("hello again", "You said: hello again")
}

// dockerRefused checks that a model's refusal fails the execution with its code, and that the session continues.
func (k *talk) dockerRefused(architecture string) {
	k.t.Helper()
	x := k.until(k.post("bad request", nil))
	if end := ended[events.ExecutionFailed](x); end.Code != "MODEL_ERROR" || !strings.Contains(end.Message, "scripted refusal") {
		k.t.Errorf("%s: ended with %+v", architecture, end)
	}
	k.mustComplete("hello after that", "You said: hello after that")
}

// idle lets the session's idle timeout pass, and waits until its sandbox has ended.
func (k *talk) idle() {
	k.t.Helper()
	if code := k.c.Call(0, "PATCH", "/api/sessions/"+k.session, map[string]any{"sessionOptions": map[string]any{"idleTimeoutMs": 1000}}, nil); code != http.StatusOK {
		k.t.Fatalf("patch answered %d", code)
	}
	s, err := k.c.JoinSocket(0, k.session, k.s)
	if err != nil {
		k.t.Fatal(err)
	}
	k.s = s
	defer s.Close()
	for {
		w, err := s.Next()
		if err != nil {
			k.t.Fatalf("waiting for the idle sandbox's end: %v", err)
		}
		if w.Type == (events.SandboxTerminated{}).EventType() {
			break
		}
	}
	list := slices.DeleteFunc(slices.Clone(s.Events), func(w events.WireEvent) bool { return w.Type != (events.WorkspaceSynced{}).EventType() })
	if len(list) == 0 {
		k.t.Error("no snapshot was taken before the idle sandbox ended")
	}
	if code := k.c.Call(0, "PATCH", "/api/sessions/"+k.session, map[string]any{"sessionOptions": map[string]any{"idleTimeoutMs": uint32(time.Hour / time.Millisecond)}}, nil); code != http.StatusOK {
		k.t.Fatalf("patch answered %d", code)
	}
}
