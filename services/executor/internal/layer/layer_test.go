package layer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCheckURL_RefusesCredentials(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"https://registry.npmjs.org", "https://registry.npmjs.org/", "http://127.0.0.1:7070/npm", "https://mirror.example.com:8443/a/simple/"} {
		if err := layer.CheckURL(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for bad, says := range map[string]string{
		"": "it is not http", "registry.npmjs.org": "it is not http", "ftp://x": "it is not http", "file:///x": "it is not http", "https://": "it is not http", "https://u:hunter2@x": "it has a user", "https://u@x": "it has a user",
		"https://x?token=hunter2": "it has a user, a query", "https://x#y": "it has a user, a query or a fragment", "https://x/a b": "has a character that is not valid in a URL", "https://hunter2\x7f": "it is not a URL", "--registry=https://x": "it is not a URL", "--registry": "it is not http",
	} {
		err := layer.CheckURL(bad)
		if err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestInstallers(t *testing.T) {
	t.Parallel()
	set := dependency.PackageSet{NPM: []string{"@a/b@1.0.0", "c@2.0.0"}, PIP: []string{"d[e]==3"}}
	list := layer.Config{NPMRegistry: "https://npm.example.com", PIPIndexURL: "http://pip.example.com:81/simple"}.Installers(set, "/l")
	if len(list) != 2 || list[0].Name != "npm" || list[1].Name != "pip" {
		t.Fatal(list)
	}
	npm, pip := list[0].Args, list[1].Args
	if !slices.Equal(npm[:4], []string{"npm", "install", "--prefix", "/l"}) || !slices.Contains(npm, "--registry=https://npm.example.com") || !slices.Equal(npm[len(npm)-3:], []string{"--", "@a/b@1.0.0", "c@2.0.0"}) ||
		slices.Contains(npm, "--replace-registry-host=always") {
		t.Error(npm)
	}
	if !slices.Equal(pip[:6], []string{"python3", "-m", "pip", "install", "--target", "/l/python"}) || !slices.Contains(pip, "--index-url=http://pip.example.com:81/simple") ||
		!slices.Contains(pip, "--trusted-host=pip.example.com:81") || !slices.Equal(pip[len(pip)-2:], []string{"--", "d[e]==3"}) {
		t.Error(pip)
	}
	routed := layer.Config{NPMRegistry: "http://127.0.0.1:7070/npm"}.Installers(dependency.PackageSet{NPM: set.NPM}, "/l")
	if len(routed) != 1 || !slices.Contains(routed[0].Args, "--replace-registry-host=always") {
		t.Error(routed)
	}
	own := layer.Config{}.Installers(set, "/l")
	for _, i := range own {
		if slices.ContainsFunc(i.Args, func(a string) bool { return strings.HasPrefix(a, "--registry") || strings.HasPrefix(a, "--index") }) {
			t.Error(i.Args)
		}
	}
}

func TestSaid_RemovesCredentials(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                "nothing",
		" \n\n":                           "nothing",
		"one\r\ntwo\n":                    "one\ntwo",
		"\x1b[31mred\x1b[0m\x07\n":        "red",
		"GET https://u:hunter2@x/y":       "GET https://***@x/y",
		"//x/:_authToken=hunter2 rest":    "//x/:_authToken=*** rest",
		"Authorization: Bearer hunter2":   "Authorization: ***",
		`{"token": "hunter2"}`:            `{"token": "***"}`,
		"bad \xff byte":                   "bad \uFFFD byte",
		strings.Repeat("line\n", 30):      strings.TrimSuffix(strings.Repeat("line\n", 20), "\n"),
		"package token-bucket was not OK": "package token-bucket was not OK",
	} {
		if got := layer.LastLines(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if long := layer.LastLines(strings.Repeat("é", 5000)); len(long) > 2010 || !strings.HasPrefix(long, "…é") || !strings.HasSuffix(long, "é") {
		t.Errorf("%d bytes: %.20q", len(long), long)
	}
	var tail layer.Tail
	for range 100 {
		_, _ = tail.Write([]byte(strings.Repeat("x", 1000) + "\n"))
	}
	if got := tail.String(); len(got) != 16<<10 || !strings.HasSuffix(got, "x\n") {
		t.Errorf("%d bytes are kept", len(got))
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	c := layer.Config{Within: time.Minute, MaxBytes: 1 << 20}
	for _, err := range []error{layer.InstallError("x"), c.TooLargeError(), c.TimeoutError("x")} {
		var typed *sandbox.Error
		if !errors.As(err, &typed) || typed.Code != sandbox.CodeDependenciesFailed {
			t.Error(err)
		}
	}
}

// Concurrent callers with the same key share one call; each key has its own.
func TestOnce_SharesACall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var o layer.SingleFlight
		var made atomic.Int32
		release := make(chan struct{})
		var all sync.WaitGroup
		for _, key := range []string{"a", "a", "a", "b"} {
			all.Go(func() {
				got, err := o.Do(t.Context(), key, func(context.Context) (string, error) {
					made.Add(1)
					<-release
					return key, nil
				})
				if got != key || err != nil {
					t.Errorf("%s: %s, %v", key, got, err)
				}
			})
		}
		synctest.Wait()
		close(release)
		all.Wait()
		if n := made.Load(); n != 2 {
			t.Errorf("made %d times", n)
		}
		gone := errors.New("gone")
		if _, err := o.Do(t.Context(), "a", func(context.Context) (string, error) { return "", gone }); !errors.Is(err, gone) {
			t.Error(err)
		}
	})
}

// A caller that gives up does not affect others. The call ends with the last caller, and later callers start another
// one.
func TestOnce_EndsWithTheLastCaller(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var o layer.SingleFlight
		ended := make(chan struct{})
		work := func(ctx context.Context) (string, error) {
			<-ctx.Done()
			time.Sleep(time.Second) // it takes its time to clean up
			close(ended)
			return "", ctx.Err()
		}
		first, leave := context.WithCancel(t.Context())
		second, leaveToo := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for _, ctx := range []context.Context{first, second} {
			all.Go(func() {
				if _, err := o.Do(ctx, "a", work); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		leave()
		synctest.Wait()
		select {
		case <-ended:
			t.Error("it ended for the one who still waits")
		default:
		}
		leaveToo()
		synctest.Wait()
		got, err := o.Do(t.Context(), "a", func(context.Context) (string, error) { return "anew", nil })
		if got != "anew" || err != nil {
			t.Errorf("%s, %v", got, err)
		}
		all.Wait()
		<-ended
	})
}
