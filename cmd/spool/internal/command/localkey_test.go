package command

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// keyRecorder is a server that records the values of the header Authorization of all requests.
type keyRecorder struct {
	*httptest.Server
	mu   sync.Mutex
	seen map[string]bool
}

func recordKeys(t *testing.T) *keyRecorder {
	t.Helper()
	k := &keyRecorder{seen: map[string]bool{}}
	k.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.seen[r.Header.Get("Authorization")] = true
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"keys":[]}`)) // the client may be gone
	}))
	t.Cleanup(k.Close)
	return k
}

// TestLocalKey_IsSentOnlyToTheStackOnTheDataFolder tests which key a command sends to which server.
func TestLocalKey_IsSentOnlyToTheStackOnTheDataFolder(t *testing.T) {
	t.Parallel()
	const other = "spool_sk_other"
	for name, c := range map[string]struct {
		args  []string // STACK and ELSEWHERE stand for the URLs of the two servers
		found bool     // whether the stack runs on the data folder
		want  string   // the key that the stack receives; "" if the command calls the other server, without a key
	}{
		"the stack on the data folder":         {[]string{"keys", "ls"}, true, fakeLocalKey},
		"the URL of the stack":                 {[]string{"keys", "ls", "--url", "STACK"}, true, fakeLocalKey},
		"the URL of the stack with a slash":    {[]string{"keys", "ls", "--url", "STACK/"}, true, fakeLocalKey},
		"a key of the flags":                   {[]string{"keys", "ls", "--key", other}, true, other},
		"another server":                       {[]string{"keys", "ls", "--url", "ELSEWHERE"}, true, ""},
		"another server at the default URL":    {[]string{"keys", "ls"}, false, ""},
		"a URL that begins as that of a stack": {[]string{"keys", "ls", "--url", "ELSEWHERE/STACK"}, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stack, elsewhere := recordKeys(t), recordKeys(t)
			l := &fakeLocal{dir: t.TempDir()}
			if c.found {
				l.found = &StackConnection{URL: stack.URL, LocalKey: fakeLocalKey}
			}
			w := testIO(t)
			w.Local = l
			if !c.found {
				w.DefaultURL = elsewhere.URL
			}
			var args []string
			for _, a := range c.args {
				args = append(args, strings.NewReplacer("STACK", stack.URL, "ELSEWHERE", elsewhere.URL).Replace(a))
			}
			got := spool(t, w, args...)
			if got.code != ExitDone && c.want != "" {
				t.Errorf("got %+v", got)
			}
			if c.want != "" && (!stack.seen["Bearer "+c.want] || len(elsewhere.seen) > 0) {
				t.Errorf("the stack received %v, the other server %v", stack.seen, elsewhere.seen)
			}
			if c.want == "" && (len(stack.seen) > 0 || len(elsewhere.seen) != 1 || !elsewhere.seen[""]) {
				t.Errorf("the stack received %v, the other server %v", stack.seen, elsewhere.seen)
			}
		})
	}
}

func TestRun_UsesTheLocalKeyOfTheStackThatItStarts(t *testing.T) {
	t.Parallel()
	f := serve(t, accepted, dispatched, answered, events.ExecutionCompleted{})
	var mu sync.Mutex
	seen := map[string]bool{}
	handler := f.Config.Handler
	f.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Header.Get("Authorization")] = true
		mu.Unlock()
		handler.ServeHTTP(w, r)
	})
	w := testIO(t)
	w.Local = &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return newFakeStack(f.URL), nil }}
	if got := spool(t, w, "run", "q"); got.code != ExitDone {
		t.Fatalf("got %+v", got)
	}
	if len(seen) != 1 || !seen["Bearer "+fakeLocalKey] {
		t.Errorf("the stack received %v", seen)
	}
}

func TestKeysLocal_PrintsTheKeyOfARunningStack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		found *StackConnection
		want  result
	}{
		"a running stack":               {&StackConnection{URL: nowhere, LocalKey: fakeLocalKey}, result{ExitDone, fakeLocalKey + "\n", ""}},
		"no stack":                      {nil, result{ExitFailed, "", "spool: no stack runs on /d: start it with `spool up`, or name its folder with --data\n"}},
		"a stack of an earlier version": {&StackConnection{URL: nowhere}, result{ExitFailed, "", "spool: the stack on /d is of an earlier version and has no local key: start it again\n"}},
	} {
		w := testIO(t)
		w.Local = &fakeLocal{dir: t.TempDir(), found: c.found}
		if got := spool(t, w, "keys", "local", "--data", "/d"); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestUp_RequiresAKeyUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args       []string
		auth, says string
	}{
		{nil, "keys", ""},
		{[]string{"--no-auth"}, "off", "a local agent can approve its own calls"},
		{[]string{"--auth", "off"}, "off", "a local agent can approve its own calls"},
	} {
		stack, signals := newFakeStack("http://127.0.0.1:7"), make(chan os.Signal, 1)
		l := &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) {
			signals <- syscall.SIGTERM
			return stack, nil
		}}
		w := testIO(t)
		var out, errs bytes.Buffer
		w.Local, w.Signals, w.Out, w.Err = l, signals, &out, &errs
		code := Run(t.Context(), append([]string{"up"}, c.args...), w)
		if code != ExitDone || l.started[0].Auth != c.auth || !strings.Contains(errs.String(), c.says) || (c.says == "") != (errs.Len() == 0) {
			t.Errorf("up %v: exit code %d, auth %q, printed %q", c.args, code, l.started[0].Auth, errs.String())
		}
	}
}

// serveCodes runs a gateway with a path prefix that answers each request with a code, if it has the local key.
func serveCodes(t *testing.T, prefix string) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/health" {
			_, _ = w.Write([]byte(`{"status":"ok"}`)) // the client may be gone
			return
		}
		if r.URL.Path == "/api/openapi.json" {
			_, _ = w.Write([]byte(`{"servers":[{"url":"` + prefix + `"}]}`)) // the client may be gone
			return
		}
		if r.Method+" "+r.URL.Path != "POST /api/signin/codes" || r.Header.Get("Authorization") != "Bearer "+fakeLocalKey {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte(`{"code":"spool_sc_x","validMs":60000}`)) // the client may be gone
	}))
	t.Cleanup(s.Close)
	return s
}

func TestOpen_PrintsAURLWithTheCodeInItsFragment(t *testing.T) {
	t.Parallel()
	s := serveCodes(t, "")
	w := testIO(t)
	w.Local = &fakeLocal{dir: t.TempDir(), found: &StackConnection{URL: s.URL, LocalKey: fakeLocalKey}}
	if got := spool(t, w, "open"); got != (result{ExitDone, s.URL + "/#code=spool_sc_x\n", ""}) {
		t.Errorf("open: %+v", got)
	}
	s = serveCodes(t, "/tools/spool")
	w.Local = &fakeLocal{dir: t.TempDir(), found: &StackConnection{URL: s.URL, LocalKey: fakeLocalKey}}
	if got := spool(t, w, "open"); got != (result{ExitDone, s.URL + "/tools/spool/#code=spool_sc_x\n", ""}) {
		t.Errorf("open below a prefix: %+v", got)
	}
	if got := spool(t, w, "open", "--json"); got.code != ExitDone || !strings.Contains(got.out, `"code":"spool_sc_x"`) {
		t.Errorf("open --json: %+v", got)
	}
}

func TestUp_OpenPrintsTheURLAfterTheStackIsReady(t *testing.T) {
	t.Parallel()
	s := serveCodes(t, "")
	stack, signals := newFakeStack(s.URL), make(chan os.Signal, 1)
	w, out := testIO(t), &watched{lines: 2, full: make(chan struct{})}
	var text bytes.Buffer
	w.Local = &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
	w.Signals, w.Out, w.Err = signals, io.MultiWriter(&text, out), &bytes.Buffer{}
	var sending sync.WaitGroup
	sending.Go(func() { <-out.full; signals <- syscall.SIGTERM })
	code := Run(t.Context(), []string{"up", "--open"}, w)
	sending.Wait()
	if want := "ready " + s.URL + "\n" + s.URL + "/#code=spool_sc_x\n"; code != ExitDone || text.String() != want || stack.closed != 1 {
		t.Errorf("exit code %d, printed %q, want %q; closed %d times", code, text.String(), want, stack.closed)
	}
}

func TestPageURL_HasThePrefixOnce(t *testing.T) {
	t.Parallel()
	for _, c := range [][3]string{
		{"http://127.0.0.1:7700", "", "http://127.0.0.1:7700/"}, {"http://127.0.0.1:7700", "/spool", "http://127.0.0.1:7700/spool/"},
		{"https://tools.example.com/spool", "/spool", "https://tools.example.com/spool/"},
	} {
		if got := pageURL(c[0], c[1]); got != c[2] {
			t.Errorf("%s below %q: %s, want %s", c[0], c[1], got, c[2])
		}
	}
}

func TestUp_PrintsTheURLOfTheInspector(t *testing.T) {
	t.Parallel()
	const url = "http://127.0.0.1:7"
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "ready " + url + "\ninspector " + url + "/\n"},
		{[]string{"--path-prefix", "/spool"}, "ready " + url + "\ninspector " + url + "/spool/\n"},
		{[]string{"--no-web"}, "ready " + url + "\n"},
	} {
		stack, signals := newFakeStack(url), make(chan os.Signal)
		w, out := testIO(t), &watched{lines: strings.Count(c.want, "\n"), full: make(chan struct{})}
		var text bytes.Buffer
		w.Local = &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
		w.Signals, w.Out, w.Err = signals, io.MultiWriter(&text, out), &bytes.Buffer{}
		var sending sync.WaitGroup
		sending.Go(func() { <-out.full; signals <- syscall.SIGTERM })
		code := Run(t.Context(), append([]string{"up"}, c.args...), w)
		sending.Wait()
		if code != ExitDone || text.String() != c.want {
			t.Errorf("up %v: exit code %d, printed %q, want %q", c.args, code, text.String(), c.want)
		}
	}
	if got := spool(t, testIO(t), "up", "--open", "--no-web"); got.code != ExitUsage || !strings.Contains(got.err, "--no-web") {
		t.Errorf("up --open --no-web: %+v", got)
	}
}
