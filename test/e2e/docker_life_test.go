package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestDockerLife_OfContainers tests what happens to containers apart from turns.
func TestDockerLife_OfContainers(t *testing.T) {
	c := newDockerCluster(t, harness.Options{Executor: executor.Config{Pool: []string{"spool=1"}, OpenAIModel: "known-model", SandboxMemory: 512 << 20}})
	for name, test := range map[string]func(*testing.T, *harness.Cluster){
		"pause":         dockerPause,
		"pool":          dockerPool,
		"terminate":     dockerTerminate,
		"max age":       dockerMaxAge,
		"missing image": dockerMissingImage,
		"killed":        dockerKilled,
		"bad options":   dockerBadOptions,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c)
		})
	}
}

func model() map[string]any { return map[string]any{"model": "known-model"} }

func with(options map[string]any) map[string]any {
	return map[string]any{"model": "known-model", "sessionOptions": options}
}

func (k *talk) control(path string) {
	k.t.Helper()
	var answer struct{ Code, Detail string }
	if code := k.c.Call(0, "POST", path, map[string]any{}, &answer); code != http.StatusAccepted {
		k.t.Fatalf("%s answered %d %+v", path, code, answer)
	}
}

// dockerPause checks that a turn is paused with its container, and continues after the resume.
func dockerPause(t *testing.T, c *harness.Cluster) {
	k := newTalkWith(t, c, "spool", model())
	execution := k.post("run the command sleep 3; echo slept", func(w events.WireEvent) bool {
		return !(w.Type == events.BlockStart{}.EventType() && strings.Contains(string(w.Data), "tool_use"))
	})
	k.control("/api/executions/" + execution + "/pause")
	var shown struct{ Phase string }
	harness.Eventually(t, "the execution is paused", func() bool {
		k.get("/api/executions/"+execution, &shown)
		return shown.Phase == "paused"
	})
	if state := harness.RunDocker(t, "inspect", "-f", "{{.State.Paused}}", k.c.SandboxContainer(k.session)); state != "true" {
		t.Errorf("the state of the container is %s, want paused", state)
	}
	k.control("/api/executions/" + execution + "/resume")
	x := k.until(execution)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "slept") {
		t.Errorf("ended with %+v", end)
	}
	for _, want := range []events.Type{events.ExecutionPaused{}.EventType(), events.ExecutionResumed{}.EventType()} {
		if !strings.Contains(kinds(x), string(want)) {
			t.Errorf("%s is missing in %s", want, kinds(x))
		}
	}
	if n := len(of[events.ExecutionStarted](x)); n != 1 {
		t.Errorf("%d starts", n)
	}
}

func kinds(x turn) string {
	var out []string
	for _, e := range x.events {
		out = append(out, string(e.Type))
	}
	return strings.Join(out, " ")
}

// dockerPool checks that a session's first turn uses a pooled sandbox whose agent is already started.
func dockerPool(t *testing.T, c *harness.Cluster) {
	harness.Eventually(t, "a pooled sandbox is taken", func() bool {
		k := newTalkWith(t, c, "spool", nil) // the agents of the pool have the default model
		k.mustComplete("are you there?", "You said: are you there?")
		for _, e := range k.s.Events {
			if e.Type == (events.SandboxReady{}).EventType() && strings.Contains(string(e.Data), `"pooled":true`) {
				if container := k.c.SandboxContainer(k.session); !strings.Contains(harness.RunDocker(t, "inspect", "-f", "{{.Name}}", container), k.session) {
					t.Errorf("the pooled container is not named after its session %s", k.session)
				}
				return true
			}
		}
		return false
	})
}

// dockerTerminate checks that a terminated agent and its container end at once, and that the next sandbox has the
// workspace.
func dockerTerminate(t *testing.T, c *harness.Cluster) {
	k := newTalkWith(t, c, "spool", model())
	k.mustComplete("write a file", "The file is written.")
	execution := k.post("run the command sleep 300", func(w events.WireEvent) bool {
		return !(w.Type == events.BlockStart{}.EventType() && strings.Contains(string(w.Data), "tool_use"))
	})
	container := k.c.SandboxContainer(k.session)
	k.control("/api/sessions/" + k.session + "/environment/terminate")
	x := k.until(execution)
	if end := ended[events.ExecutionCancelled](x); end.Reason != "terminated" {
		t.Errorf("ended with %+v", end)
	}
	harness.Eventually(t, "the container is gone", func() bool {
		return harness.RunDocker(t, "ps", "-aq", "--no-trunc", "--filter", "id="+container) == ""
	})
	k.mustComplete("run the command cat hello.txt", "hello, world")
}

// dockerMaxAge checks that a container that is too old is replaced between two turns.
func dockerMaxAge(t *testing.T, c *harness.Cluster) {
	k := newTalkWith(t, c, "spool", with(map[string]any{"sandboxMaxAgeMs": 1000}))
	k.mustComplete("write a file", "The file is written.")
	first := k.c.SandboxContainer(k.session)
	began := time.Now()
	harness.Eventually(t, "it is old", func() bool { return time.Since(began) > time.Second })
	k.mustComplete("run the command cat hello.txt", "hello, world")
	if second := k.c.SandboxContainer(k.session); second == first {
		t.Error("the container is the same")
	}
}

// dockerMissingImage checks that a missing image fails the execution with a code and a remedy.
func dockerMissingImage(t *testing.T, c *harness.Cluster) {
	k := newTalkWith(t, c, "spool", with(map[string]any{"image": "spool-test/no-such-image:1"}))
	k.mustFail("hello", "IMAGE_NOT_FOUND", "spool-test/no-such-image:1")
}

// dockerKilled checks that a container that is killed during a turn is replaced, with its workspace.
func dockerKilled(t *testing.T, c *harness.Cluster) {
	k := newTalkWith(t, c, "spool", model())
	k.mustComplete("write a file", "The file is written.")
	execution := k.post("run the command cat hello.txt; test -e twice && echo again || { touch twice; sleep 300; }", func(w events.WireEvent) bool {
		return !(w.Type == events.FileCreated{}.EventType() && strings.Contains(string(w.Data), "twice"))
	})
	harness.RunDocker(t, "kill", k.c.SandboxContainer(k.session))
	x := k.until(execution)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "hello, world") || !strings.Contains(end.Result, "again") {
		t.Errorf("ended with %+v", end)
	}
	if !strings.Contains(kinds(x), "sandbox_replaced") || len(of[events.ExecutionStarted](x)) != 2 {
		t.Errorf("events %s", kinds(x))
	}
}

// dockerBadOptions checks that invalid options are refused with their field before anything is created.
func dockerBadOptions(t *testing.T, c *harness.Cluster) {
	for field, body := range map[string]map[string]any{
		"sessionOptions.egress":         {"architecture": "spool", "sessionOptions": map[string]any{"egress": []string{"not a host"}}},
		"sessionOptions.image":          {"architecture": "spool", "sessionOptions": map[string]any{"image": "Not An Image"}},
		"sessionOptions.command":        {"architecture": "acp"},
		"sessionOptions.syncIntervalMs": {"architecture": "spool", "sessionOptions": map[string]any{"syncIntervalMs": 1}},
		"sandbox":                       {"architecture": "spool", "sandbox": "cloud"},
	} {
		var answer struct{ Code, Field, Detail string }
		if code := c.Call(0, "POST", "/api/sessions", body, &answer); code != http.StatusBadRequest || !strings.HasPrefix(answer.Field, field) {
			t.Errorf("%s: answered %d %+v", field, code, answer)
		}
	}
}
