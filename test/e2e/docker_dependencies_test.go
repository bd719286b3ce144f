package e2e

import (
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/dependency/dependencytest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// packages serves an npm package, a Python package, and an npm package whose script fails.
func packages(t *testing.T) (r *dependencytest.Registry, url string) {
	t.Helper()
	r, err := dependencytest.New("http://npm.internal", []dependencytest.NPMPackage{
		{
			Name: "@spool/greeter", Version: "1.2.3", Bin: map[string]string{"greet-npm": "cli.js"},
			Files:   map[string]string{"cli.js": "#!/usr/bin/env node\nconsole.log('hello ' + require('fs').readFileSync(__dirname + '/made.txt'))\n"},
			Scripts: map[string]string{"postinstall": "printf 'from a script of npm' > made.txt"},
		},
		{
			Name: "curious", Version: "1.0.0",
			Scripts: map[string]string{"postinstall": `for u in http://127.0.0.1:7070/anthropic/v1/models http://127.0.0.1:7070/secretive/ http://example.com/; do curl -s -o /dev/null -w "%{http_code} " "$u"; done; echo; env | cut -d= -f1 | tr '\n' ' '; exit 3`},
		},
	}, []dependencytest.PythonPackage{{Name: "greeting", Version: "0.1", Module: "def main():\n    print('hello from pip')\n", Programs: []string{"greet-pip"}}})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(r)
	t.Cleanup(s.Close)
	return r, s.URL
}

// TestDockerDependencies_AreInstalledOnce tests that an agent's dependencies are installed once, through the egress
// proxy, for sessions that begin concurrently on two executors, and that their commands can use them. Later sessions
// need no registry. If a dependency cannot be installed, the execution ends before its agent starts, with the reason.
func TestDockerDependencies_AreInstalledOnce(t *testing.T) {
	registry, url := packages(t)
	elsewhere := httptest.NewServer(nil)
	t.Cleanup(elsewhere.Close)
	c := newDockerCluster(t, harness.Options{
		Executors: 2, EgressRoutes: map[string]string{"npm": url + "/npm", "pypi": url, "secretive": elsewhere.URL},
		Executor: executor.Config{NPMRegistry: "http://127.0.0.1:7070/npm", PIPIndexURL: "http://127.0.0.1:7070/pypi/pip"},
	})
	agent := func(slug, architecture string, dependencies map[string]any) {
		apply(c, "agents", slug, map[string]any{"architecture": architecture, "model": "known-model", "instructions": "You do what you are asked.", "dependencies": dependencies})
	}
	good := map[string]any{"npm": []string{"@spool/greeter@1.2.3"}, "pip": []string{"greeting==0.1"}}
	agent("built-in", "spool", good)
	agent("claude", "claude-code", good)
	agent("codex", "codex", good)
	agent("curious", "spool", map[string]any{"npm": []string{"curious@1.0.0"}})
	agent("hopeless", "spool", map[string]any{"pip": []string{"nowhere==1.0"}})

	const query = "run the command greet-npm && greet-pip && python3 -c 'import greeting; greeting.main()'"
	var all sync.WaitGroup
	told := make([]int, 3)
	for i, slug := range []string{"built-in", "claude", "codex"} {
		k := newTalkWith(t, c, "", map[string]any{"agent": slug})
		all.Go(func() {
			x := k.until(k.post(query, nil))
			said := ended[events.ExecutionCompleted](x).Result
			if !strings.Contains(said, "hello from a script of npm") || strings.Count(said, "hello from pip") != 2 {
				t.Errorf("%s said %s", slug, said)
			}
			told[i] = installs(x)
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	if n, m := registry.CountRequests(".tgz"), registry.CountRequests(".whl"); n != 1 || m != 1 || slices.Contains(told, 1) || slices.Max(told) != 2 {
		t.Errorf("%d and %d downloads; %v log events", n, m, told)
	}

	registry.SetAvailable(false)
	k := newTalkWith(t, c, "", map[string]any{"agent": "built-in"})
	x := k.until(k.post(query, nil))
	if said := ended[events.ExecutionCompleted](x).Result; !strings.Contains(said, "hello from a script of npm") || installs(x) != 0 {
		t.Errorf("without a registry the result is %s, with %d installations", said, installs(x))
	}
	registry.SetAvailable(true)

	for slug, says := range map[string][]string{
		"hopeless": {"pip ended with code 1", "No matching distribution found for nowhere==1.0"},
		"curious":  {"npm ended with code 3", "403 403 403"},
	} {
		x := func() turn {
			k := newTalkWith(t, c, "", map[string]any{"agent": slug})
			return k.until(k.post("hello", nil))
		}()
		end := ended[events.ExecutionFailed](x)
		if end.Code != "DEPENDENCIES_FAILED" {
			t.Errorf("%s ended with %+v", slug, end)
		}
		for _, s := range append(says, "the agent's dependencies could not be installed") {
			if !strings.Contains(end.Message, s) {
				t.Errorf("the message of %s does not contain %q: %s", slug, s, end.Message)
			}
		}
		for _, secret := range []string{"API_KEY", "SPOOL_RUNNER", "SPOOL_EGRESS"} {
			if strings.Contains(end.Message, secret) {
				t.Errorf("the installation had access to %s: %s", secret, end.Message)
			}
		}
		if slices.ContainsFunc(x.events, func(w events.WireEvent) bool {
			return strings.HasPrefix(string(w.Type), "sandbox_") || w.Type == "execution_started"
		}) {
			t.Errorf("%s: a sandbox was created", slug)
		}
	}
}

// installs counts the log events of a turn about an installation.
func installs(x turn) (n int) {
	for _, w := range x.events {
		if w.Type == (events.Log{}).EventType() && strings.Contains(string(w.Data), "dependencies are") {
			n++
		}
	}
	return n
}
