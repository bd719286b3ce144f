package command

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// TestRun_SendsAgentAndVariables tests that the request names the agent and has the variables, and that the values of
// secrets come from the environment, never from an argument.
func TestRun_SendsAgentAndVariables(t *testing.T) {
	t.Parallel()
	w := func() IO {
		w := testIO(t)
		w.LookupEnv = func(name string) (string, bool) {
			v, ok := map[string]string{"TOKEN": "some-secret", "EMPTY": ""}[name]
			return v, ok
		}
		return w
	}
	const variables = `"environment":{"A":{"value":"1=2"},"TOKEN":{"value":"some-secret","secret":true}}`
	f := serve(t, accepted, dispatched, events.ExecutionCompleted{})
	got := spool(t, w(), "run", "--url", f.URL, "--agent", "acme/reviewer@stable", "--env", "a", "--env", "b", "--var", "A=1=2", "--secret", "TOKEN", "q")
	if want := `{"agent":"acme/reviewer@stable","content":"q","environments":["a","b"],` + variables + `,"permissions":{"unattended":true}}`; got.code != ExitDone || f.bodies[0] != want {
		t.Errorf("%+v, posted %s", got, f.bodies[0])
	}
	f = serve(t, accepted, dispatched, events.ExecutionCompleted{})
	if got := spool(t, w(), "run", "--url", f.URL, "--instance", "night", "q"); got.code != ExitDone || f.bodies[0] != `{"content":"q","instance":"night","permissions":{"unattended":true}}` {
		t.Errorf("%+v, posted %s", got, f.bodies[0])
	}
	f = serve(t, accepted, dispatched, events.ExecutionCompleted{})
	if got := spool(t, w(), "run", "--url", f.URL, "--session", ses, "--var", "A=1=2", "--secret", "TOKEN", "q"); got.code != ExitDone || !slices.Contains(f.bodies, `{"content":"q",`+variables+`,"permissions":{"unattended":true}}`) {
		t.Errorf("%+v, posted %v", got, f.bodies)
	}
	for says, args := range map[string][]string{
		"var: \"A\" is not NAME=VALUE":          {"--var", "A"},
		"A is set twice":                        {"--var", "A=1", "--var", "A=2"},
		"var: \"A B\" is not a variable's name": {"--var", "A B=1"},
		"var: variable SPOOL_X is set by Spool": {"--var", "SPOOL_X=1"},
		"environment variable \"NONE\"":         {"--secret", "NONE"},
		"environment variable \"EMPTY\"":        {"--secret", "EMPTY"},
		"environment variable \"T=x\"":          {"--secret", "T=x"},
		"leave them out with --session":         {"--session", ses, "--agent", "a"},
	} {
		if got := spool(t, w(), append(append([]string{"run", "--url", nowhere}, args...), "q")...); got.code != ExitUsage || !strings.Contains(got.err, says) {
			t.Errorf("%v: %+v", args, got)
		}
	}
}
