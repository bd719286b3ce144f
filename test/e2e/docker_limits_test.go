package e2e

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestDockerTurns_AreLimitedByTheProxy tests limits.turns of agents that do not count turns themselves. The egress
// proxy allows that number of model requests for each turn. The turn ends with its reason before the next request.
func TestDockerTurns_AreLimitedByTheProxy(t *testing.T) {
	c := newDockerCluster(t, harness.Options{})
	for _, architecture := range []string{"codex", "opencode", "acp"} {
		more := architectures()[architecture]
		spec := map[string]any{"architecture": architecture, "model": more["model"], "instructions": "You count " + architecture + " turns.", "limits": map[string]any{"turns": 1}}
		session := map[string]any{"agent": "counted-" + architecture}
		if architecture == "acp" {
			spec["command"] = []string{"opencode", "acp"}
			session["workspaceFiles"] = more["workspaceFiles"]
		}
		apply(c, "agents", "counted-"+architecture, spec)
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			k := newTalkWith(t, c, "", session)
			calls := func() (n int) {
				for _, r := range c.Model.Requests() {
					if strings.Contains(string(r.Body), "You count "+architecture+" turns.") {
						n++
					}
				}
				return n
			}
			for n := 1; n <= 2; n++ {
				k.mustFail("run the command echo once", "BUDGET_EXCEEDED", "the execution has had 1 turns, and its budget is 1")
				// An ACP agent may request a title, which counts for the same limit, before it requests the answer.
				if have := calls(); have > n || have < n && architecture != "acp" {
					t.Errorf("after turn %d the model had received %d requests", n, have)
				}
			}
			if architecture != "acp" {
				k.mustComplete("hello", "You said: hello")
			}
		})
	}
}
