package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// newModalCluster returns a cluster whose sandboxes run on mockmodal, and whose executors are separate processes.
func newModalCluster(t *testing.T, opts harness.Options) *harness.Cluster {
	t.Helper()
	harness.NeedDocker(t)
	opts.Modal, opts.Outages, opts.Script = true, true, script(t, "docker.yaml")
	return harness.New(t, opts)
}

// TestModal_Talk tests Claude Code and the built-in agent on Modal through the API of clients: turns in one process,
// an interrupt, the idle timeout, and the same files and conversation in another sandbox. The sandbox has no model
// key, and its cost is reported.
func TestModal_Talk(t *testing.T) {
	t.Parallel()
	c := newModalCluster(t, harness.Options{})
	for _, architecture := range []string{"claude-code", "spool"} {
		t.Run(architecture, func(t *testing.T) {
			k := newTalkWith(t, c, architecture, model())
			first := k.mustComplete("Remember the number 4711", "I will remember 4711.")
			k.mustComplete("which number was it?", "You asked me to remember 4711.").checkSameProcess(first)
			k.mustComplete("write a file", "The file is written.")
			k.awaitFile("hello.txt", "hello, world\n")
			k.noKeyInside()
			k.dockerInterrupt().checkSameProcess(first)
			sandbox := k.sandbox()
			k.idle()
			harness.Eventually(t, "the sandbox of an idle session has ended", func() bool { return !c.Modal.IsRunning(t, sandbox) })
			k.mustComplete("run the command cat hello.txt", "hello, world")
			k.mustComplete("which number was it?", "You asked me to remember 4711.")
			k.cost()
		})
	}
}

// sandbox returns the id of the session's present sandbox.
func (k *talk) sandbox() string {
	k.t.Helper()
	var shown struct{ CurrentSandbox struct{ SandboxID string } }
	k.get("/api/sessions/"+k.session, &shown)
	return shown.CurrentSandbox.SandboxID
}

// modalContainer returns the container that stands for the session's Modal sandbox.
func (k *talk) modalContainer() string {
	k.t.Helper()
	name := k.sandbox()
	for _, s := range k.c.Modal.RunningSandboxes(k.t) {
		if s.Name == name {
			return "mockmodal-" + strings.ToLower(s.ID)
		}
	}
	k.t.Fatalf("sandbox %s does not run", name)
	return ""
}

// noKeyInside searches for the models' keys in the environment and arguments of processes, and in the files of the
// sandbox, as root.
func (k *talk) noKeyInside() {
	k.t.Helper()
	// The processes of the search have the key in two pieces, so that they do not find themselves.
	const look = `printf '%s%s' "$0" "$1" > /dev/shm/key; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -cF -f /dev/shm/key; ` +
		`grep -rslF -f /dev/shm/key /workspace /spool/state /spool/run /home /tmp /etc /root /run; rm /dev/shm/key; echo looked`
	half := len(harness.ModelAPIKey) / 2
	if out := harness.RunDocker(k.t, "exec", "-u", "0", k.modalContainer(), "sh", "-c", look, harness.ModelAPIKey[:half], harness.ModelAPIKey[half:]); out != "0\nlooked" {
		k.t.Errorf("the models' key is inside: %s", out)
	}
}

// cost checks that the cost of the session's sandboxes is reported, for the session and for its executions.
func (k *talk) cost() {
	k.t.Helper()
	var shown struct{ SandboxMs, SandboxCostUsd float64 }
	k.get("/api/sessions/"+k.session, &shown)
	if want := shown.SandboxMs / 1000 * harness.ModalSandboxPrice; shown.SandboxMs == 0 || shown.SandboxCostUsd < want*0.999 || shown.SandboxCostUsd > want*1.001 {
		k.t.Errorf("the session's sandboxes ran for %g ms and cost $%g", shown.SandboxMs, shown.SandboxCostUsd)
	}
	var list struct{ Executions []struct{ SandboxMs float64 } }
	k.get("/api/sessions/"+k.session+"/executions", &list)
	var sum float64
	for _, x := range list.Executions {
		sum += x.SandboxMs
	}
	if sum == 0 || sum > shown.SandboxMs {
		k.t.Errorf("the executions' sandboxes ran for %g ms, the session's for %g", sum, shown.SandboxMs)
	}
}

// startBusyTurn posts a query whose command waits until release is called.
func (k *talk) startBusyTurn() (execution string, release func()) {
	k.t.Helper()
	execution = k.post("run the command touch began; until [ -e go ]; do sleep 0.2; done; echo done", func(w events.WireEvent) bool {
		return !(w.Type == events.FileCreated{}.EventType() && strings.Contains(string(w.Data), "began"))
	})
	container := k.modalContainer()
	return execution, func() { harness.RunDocker(k.t, "exec", "-u", "10001:10001", container, "touch", "/workspace/go") }
}

// checkUndisturbed checks that an execution completed with its first attempt. The audit of the talk checks that no event
// is stored twice.
func (k *talk) checkUndisturbed(execution string) {
	k.t.Helper()
	x := k.until(execution)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "done") {
		k.t.Errorf("ended with %+v", end)
	}
	if n := len(of[events.ExecutionStarted](x)); n != 1 {
		k.t.Errorf("%d starts in %s", n, kinds(x))
	}
}

// TestModal_Faults tests failures while an agent works or between turns: killed executors, an outage of Modal, and
// preempted sandboxes.
func TestModal_Faults(t *testing.T) {
	t.Parallel()
	c := newModalCluster(t, harness.Options{})
	first := c.StartExecutorProcess() // in addition to the cluster's own executor, which the first subtest kills
	t.Run("killed executors", func(t *testing.T) {
		k := newTalkWith(t, c, "claude-code", model())
		execution, release := k.startBusyTurn()
		c.KillExecutorProcess(0)
		first.Kill()
		first = c.StartExecutorProcess()
		release()
		k.checkUndisturbed(execution)
		k.cost()
	})
	t.Run("an outage of Modal", func(t *testing.T) {
		k := newTalkWith(t, c, "spool", model())
		execution, release := k.startBusyTurn()
		c.Modal.SetOutage(t, true)
		release()
		// Each log line follows the SDK's own retries and the wait of SPOOL_ENGINE_GONE.
		harness.Eventually(t, "the executor has retried several times", func() bool {
			return first.CountInLog("the execution is claimed when it is back") >= 5
		})
		c.Modal.SetOutage(t, false)
		k.checkUndisturbed(execution)
	})
	t.Run("preempted in a turn", func(t *testing.T) {
		k := newTalkWith(t, c, "spool", model())
		k.mustComplete("write a file", "The file is written.")
		execution := k.post("run the command cat hello.txt; test -e twice && echo again || { touch twice; sleep 300; }", func(w events.WireEvent) bool {
			return !(w.Type == events.FileCreated{}.EventType() && strings.Contains(string(w.Data), "twice"))
		})
		if code := c.Call(0, "POST", "/api/sessions/"+k.session+"/sync", map[string]any{}, nil); code != http.StatusAccepted {
			t.Fatalf("sync answered %d", code)
		}
		k.untilType(events.WorkspaceSynced{}.EventType())
		c.Modal.EndSandbox(t, k.sandbox(), "preempted")
		x := k.until(execution)
		if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "hello, world") || !strings.Contains(end.Result, "again") {
			t.Errorf("ended with %+v", end)
		}
		if replaced := of[events.SandboxReplaced](x); len(replaced) != 1 || len(of[events.WorkspaceRestored](x)) != 1 {
			t.Errorf("replaced: %+v in %s", replaced, kinds(x))
		}
		k.cost()
	})
	t.Run("preempted between turns", func(t *testing.T) {
		k := newTalkWith(t, c, "claude-code", model())
		k.mustComplete("Remember the number 4711", "I will remember 4711.")
		k.mustComplete("write a file", "The file is written.")
		k.awaitFile("hello.txt", "hello, world\n")
		c.Modal.EndSandbox(t, k.sandbox(), "timeout")
		k.mustComplete("run the command cat hello.txt", "hello, world")
		k.mustComplete("which number was it?", "You asked me to remember 4711.")
	})
	t.Run("swept", func(t *testing.T) {
		newTalkWith(t, c, "spool", model()).mustComplete("hello", "You said: hello") // prepares the image for the next session
		k := newTalkWith(t, c, "spool", model())
		// Modal creates the sandbox, and the executor does not receive the answer. The SDK does not repeat a call
		// that was ABORTED.
		c.Modal.RequestControl(t, "POST", "/faults", map[string]any{"method": "SandboxCreateV2", "code": "ABORTED", "message": "injected", "count": -1, "after": true}, nil)
		c.Modal.InjectFault(t, "SandboxGetFromName", "ABORTED")
		c.Modal.InjectFault(t, "SandboxGetFromNameV2", "ABORTED")
		k.mustFail("hello", "ENGINE_UNAVAILABLE", "")
		sandbox := k.sandbox()
		if !c.Modal.IsRunning(t, sandbox) {
			t.Fatalf("sandbox %s does not run on Modal", sandbox)
		}
		c.Modal.ClearFaults(t)
		harness.Eventually(t, "the sweep has ended the sandbox that the log does not know", func() bool { return !c.Modal.IsRunning(t, sandbox) })
	})
	t.Run("refusals", func(t *testing.T) {
		k := newTalkWith(t, c, "spool", with(map[string]any{"image": "spool-test/no-such-image:1"}))
		k.mustFail("hello", "IMAGE_NOT_FOUND", "spool-test/no-such-image:1")
		for code, want := range map[string]string{"RESOURCE_EXHAUSTED": "QUOTA_EXCEEDED", "UNAUTHENTICATED": "CREDENTIALS_REFUSED", "UNAVAILABLE": "ENGINE_UNAVAILABLE"} {
			k := newTalkWith(t, c, "spool", model())
			c.Modal.InjectFault(t, "SandboxCreateV2", code)
			k.mustFail("hello", want, "")
			c.Modal.ClearFaults(t)
			k.mustComplete("hello again", "You said: hello again")
		}
		for _, bad := range [][2]string{
			{"SPOOL_MODAL_TOKEN_SECRET=wrong", "SPOOL_MODAL_TOKEN_ID"}, {"SPOOL_MODAL_TIMEOUT=25h", "modal-timeout"}, {"SPOOL_MODAL_SANDBOX_PRICE=-1", "modal-sandbox-price"},
		} {
			p := c.StartExecutorProcess(bad[0])
			if err := p.AwaitExit(); err == nil || p.CountInLog(bad[1]) == 0 {
				t.Errorf("an executor with %s ended with %v", bad[0], err)
			}
		}
	})
}

// untilType reads the open stream up to an event of a type.
func (k *talk) untilType(want events.Type) {
	k.t.Helper()
	for {
		w, err := k.s.Next()
		if err != nil {
			k.t.Fatalf("waiting for %s: %v; %s", want, err, k.c.DescribeStoppedStream(k.session, k.s))
		}
		if w.Type == want {
			return
		}
	}
}

// TestModal_Pool tests that a session's first turn uses a pooled sandbox whose agent is already started.
func TestModal_Pool(t *testing.T) {
	t.Parallel()
	c := newModalCluster(t, harness.Options{Executor: executor.Config{Pool: []string{"spool=1"}, OpenAIModel: "known-model"}})
	harness.Eventually(t, "a pooled sandbox is taken", func() bool {
		k := newTalkWith(t, c, "spool", nil)
		k.mustComplete("are you there?", "You said: are you there?")
		for _, e := range k.s.Events {
			if e.Type == (events.SandboxReady{}).EventType() && strings.Contains(string(e.Data), `"pooled":true`) {
				return true
			}
		}
		return false
	})
}
