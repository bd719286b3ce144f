package e2e

import (
	"strconv"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestDockerRetries_ContinueInTheSameSandbox kills the process of every real agent during a turn. The next attempt
// continues in the same sandbox, with the agent's own record of the first attempt.
func TestDockerRetries_ContinueInTheSameSandbox(t *testing.T) {
	c := newDockerCluster(t, harness.Options{Executor: executor.Config{Slots: 4}})
	for architecture, more := range architectures() {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			c := c.ForSubtest(t)
			spec := map[string]any{
				"architecture": architecture, "model": more["model"], "instructions": "You do not give up easily.",
				"retries": map[string]any{"attempts": 2, "backoffMs": 1200}, "files": more["workspaceFiles"],
			}
			if options, ok := more["sessionOptions"].(map[string]any); ok {
				spec["command"] = options["command"]
			}
			apply(c, "agents", architecture+"-stubborn", spec)
			k := newTalkWith(t, c, "", map[string]any{"agent": architecture + "-stubborn"})
			k.mustComplete("Remember the number 4711", "I will remember 4711.")
			k.killedAmid("test -e twice && echo again || { touch twice; sleep 300; }", "twice")
			k.mustComplete("which number was it?", "You asked me to remember 4711.")
		})
	}
}

// killedAmid posts a query with a command that creates a file, kills the agent's process when the file exists, and
// checks that the second attempt completes.
func (k *talk) killedAmid(command, file string) {
	t := k.c.T
	t.Helper()
	container, pid := k.c.SandboxContainer(k.session), uint32(0)
	execution := k.post("run the command "+command, func(w events.WireEvent) bool {
		if w.Type == (events.ExecutionStarted{}).EventType() {
			pid = events.DecodePayload(w.Type, w.Data).(events.ExecutionStarted).PID
		}
		return !(w.Type == events.FileCreated{}.EventType() && strings.Contains(string(w.Data), file))
	})
	harness.RunDocker(t, "exec", container, "sh", "-c", "kill -9 "+strconv.Itoa(int(pid)))
	x := k.until(execution)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "again") {
		t.Errorf("ended with %+v", end)
	}
	failed, started := of[events.AttemptFailed](x), of[events.ExecutionStarted](x)
	if len(failed) != 1 || failed[0].Code != "AGENT_EXITED" || failed[0].WaitMs != 1200 || len(started) != 2 || started[1].Attempt != 2 || started[1].PID == pid {
		t.Errorf("deaths %+v, starts %+v", failed, started)
	}
	if k.c.SandboxContainer(k.session) != container {
		t.Error("the sandbox is another one")
	}
}
