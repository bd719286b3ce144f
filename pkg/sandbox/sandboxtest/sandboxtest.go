// Package sandboxtest is the conformance suite for sandbox providers.
package sandboxtest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Subject is the provider under test.
type Subject struct {
	// New returns a provider. Within one test, each call must return another object for the same engine, like that of
	// an executor that was restarted.
	New func(t testing.TB) sandbox.Provider
	// Alive reports whether a process is alive, by its pid inside the sandbox. It is nil if pids inside have no
	// meaning outside.
	Alive func(pid int) bool
	// Engine is the engine name in the labels of all sandboxes; "" means "suite".
	Engine string
	// KillRunner kills a sandbox's runner, as a failure of the engine would, and returns when the runner is dead.
	KillRunner func(t testing.TB, id string)
	// EndsWithRunner is true for a provider whose sandboxes end with their runner and leave neither an entry in the
	// list nor files.
	EndsWithRunner bool
}

// within is the time limit of every wait of the suite.
const within = 30 * time.Second

// secret names a variable of the test process that sandboxes must not see.
const secret = "SPOOL_SANDBOXTEST_SECRET"

// Exercise runs the suite. It sets a variable of the process, so the calling test must not be parallel.
func Exercise(t *testing.T, s Subject) {
	t.Setenv(secret, "must-not-be-seen")
	for _, c := range []struct {
		name string
		test func(*fixture)
	}{
		{"CreateTwice", createTwice},
		{"AttachAnew", attachAnew},
		{"AttachUnknown", attachUnknown},
		{"List", list},
		{"ExecStreams", execStreams},
		{"ExecExitCodes", execExitCodes},
		{"ExecOutlivesItsContext", execOutlivesItsContext},
		{"ExecKill", execKill},
		{"ExecRunner", execRunner},
		{"Environment", environment},
		{"Dir", dir},
		{"FilesPutGet", filesPutGet},
		{"FilesList", filesList},
		{"FilesOutside", filesOutside},
		{"FilesSymlinks", filesSymlinks},
		{"TerminateLeavesNoProcess", terminateLeavesNoProcess},
		{"TerminateTwice", terminateTwice},
		{"Wipe", wipe},
		{"Apart", terminateOneOfTwo},
		{"FilesRemove", filesRemove},
		{"ListOutside", listOutside},
		{"CreateAgain", createAgain},
		{"TakeOver", takeOver},
		{"Ended", afterContextEnded},
	} {
		s.run(t, c.name, c.test)
	}
	p := s.New(t)
	if _, ok := p.(sandbox.Pauser); ok {
		s.run(t, "Pause", func(f *fixture) { pause(f, f.p.(sandbox.Pauser)) })
	}
	if _, ok := p.(sandbox.Adopter); ok {
		s.run(t, "Adopt", func(f *fixture) { adopt(f, f.p.(sandbox.Adopter)) })
	}
}

func (s Subject) run(t *testing.T, name string, test func(*fixture)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(context.Background(), 4*within)
		t.Cleanup(cancel)
		test(&fixture{T: t, s: s, p: s.New(t), ctx: ctx})
	})
}

type fixture struct {
	*testing.T
	s   Subject
	p   sandbox.Provider
	ctx context.Context
}

func (f *fixture) id(kind events.Kind) string {
	f.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	f.must(err)
	return id
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// want checks that err is target.
func (f *fixture) want(err, target error) {
	f.Helper()
	if !errors.Is(err, target) {
		f.Errorf("error is %v, want %v", err, target)
	}
}

func (f *fixture) spec() sandbox.Spec {
	f.Helper()
	return sandbox.Spec{ID: f.id(events.KindSandbox), Labels: sandbox.Labels{
		Tenant: "default", Session: f.id(events.KindSession), Engine: cmp.Or(f.s.Engine, "suite"), Epoch: 7,
	}}
}

// create creates a sandbox that is terminated when the test ends.
func (f *fixture) create(spec sandbox.Spec) sandbox.Sandbox {
	f.Helper()
	box, err := f.p.Create(f.ctx, spec)
	f.must(err)
	f.Cleanup(func() {
		if err := f.p.Terminate(context.Background(), spec.ID, true); err != nil {
			f.Error(err)
		}
	})
	return box
}

// sh runs a shell command and returns its output and exit code.
func (f *fixture) sh(box sandbox.Sandbox, line string) (stdout, stderr string, code int) {
	f.Helper()
	return f.exec(box, sandbox.Command{Args: []string{"sh", "-c", line}}, "")
}

func (f *fixture) exec(box sandbox.Sandbox, c sandbox.Command, stdin string) (stdout, stderr string, code int) {
	f.Helper()
	p, err := box.Exec(f.ctx, c)
	f.must(err)
	errs := make(chan string, 1)
	go func() {
		raw, err := io.ReadAll(p.Stderr())
		if err != nil {
			f.Error(err)
		}
		errs <- string(raw)
	}()
	_, err = io.WriteString(p.Stdin(), stdin)
	f.must(err)
	f.must(p.Stdin().Close())
	raw, err := io.ReadAll(p.Stdout())
	f.must(err)
	code, err = p.Wait()
	f.must(err)
	return string(raw), <-errs, code
}

func createTwice(f *fixture) {
	spec := f.spec()
	first := f.create(spec)
	f.must(first.Files().Put(f.ctx, "mark", strings.NewReader("1")))
	again, err := f.p.Create(f.ctx, spec)
	f.must(err)
	if again.ID() != spec.ID || first.ID() != spec.ID {
		f.Errorf("ids %s and %s, want %s", first.ID(), again.ID(), spec.ID)
	}
	if out, _, _ := f.sh(again, "cat mark"); out != "1" {
		f.Errorf("the second Create did not return the first sandbox: mark is %q", out)
	}
	alive, err := again.Running(f.ctx)
	f.must(err)
	if !alive {
		f.Error("not running after Create")
	}
	infos, err := f.p.List(f.ctx)
	f.must(err)
	if n := len(slices.DeleteFunc(infos, func(i sandbox.Info) bool { return i.ID != spec.ID })); n != 1 {
		f.Errorf("listed %d times", n)
	}
}

func attachAnew(f *fixture) {
	spec := f.spec()
	f.must(f.create(spec).Files().Put(f.ctx, "mark", strings.NewReader("2")))
	box, err := f.s.New(f).Attach(f.ctx, spec.ID)
	f.must(err)
	if out, _, code := f.sh(box, "cat mark"); out != "2" || code != 0 || box.ID() != spec.ID {
		f.Errorf("attached to %s: mark %q, code %d", box.ID(), out, code)
	}
}

func attachUnknown(f *fixture) {
	_, err := f.p.Attach(f.ctx, f.id(events.KindSandbox))
	f.want(err, sandbox.ErrNotFound)
	_, err = f.p.Attach(f.ctx, "../../etc")
	f.want(err, sandbox.ErrNotFound)
}

func list(f *fixture) {
	a, b := f.spec(), f.spec()
	f.create(a)
	f.create(b)
	infos, err := f.s.New(f).List(f.ctx)
	f.must(err)
	for _, spec := range []sandbox.Spec{a, b} {
		i := slices.IndexFunc(infos, func(i sandbox.Info) bool { return i.ID == spec.ID })
		if i < 0 || infos[i].Labels != spec.Labels || !infos[i].Running || time.Since(infos[i].Created) > within {
			f.Errorf("%s is listed as %+v", spec.ID, infos)
		}
	}
	f.must(f.p.Terminate(f.ctx, a.ID, true))
	infos, err = f.p.List(f.ctx)
	f.must(err)
	if slices.ContainsFunc(infos, func(i sandbox.Info) bool { return i.ID == a.ID }) {
		f.Error("listed after it was terminated")
	}
}

func execStreams(f *fixture) {
	box := f.create(f.spec())
	out, errs, code := f.exec(box, sandbox.Command{Args: []string{"sh", "-c", `read line; echo "got $line"; echo bad >&2; exit 3`}}, "hello\n")
	if out != "got hello\n" || errs != "bad\n" || code != 3 {
		f.Errorf("stdout %q, stderr %q, code %d", out, errs, code)
	}
	big := strings.Repeat("0123456789abcdef", 64<<10)
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.must(err)
	go func() {
		if _, err := io.WriteString(p.Stdin(), big); err != nil {
			f.Error(err)
		}
		if err := p.Stdin().Close(); err != nil {
			f.Error(err)
		}
	}()
	raw, err := io.ReadAll(p.Stdout())
	f.must(err)
	if string(raw) != big {
		f.Errorf("received %d bytes of %d", len(raw), len(big))
	}
	_, err = p.Wait()
	f.must(err)
	// Input and output are passed on while the command runs.
	p, err = box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.must(err)
	for _, word := range []string{"one", "two"} {
		_, err := io.WriteString(p.Stdin(), word)
		f.must(err)
		buf := make([]byte, len(word))
		_, err = io.ReadFull(p.Stdout(), buf)
		f.must(err)
		if string(buf) != word {
			f.Errorf("echo of %q is %q", word, buf)
		}
	}
	f.must(p.Stdin().Close())
	_, err = p.Wait()
	f.must(err)
}

func execExitCodes(f *fixture) {
	box := f.create(f.spec())
	for line, want := range map[string]int{"true": 0, "exit 1": 1, "exit 255": 255, "kill -9 $$": -1} {
		if _, _, code := f.sh(box, line); code != want {
			f.Errorf("%s: code %d, want %d", line, code, want)
		}
	}
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"no-such-program-of-spool"}})
	if err == nil {
		code, werr := p.Wait()
		if werr == nil && code == 0 {
			f.Error("a program that does not exist was started")
		}
	}
	if _, err := box.Exec(f.ctx, sandbox.Command{}); err == nil {
		f.Error("a command without args was accepted")
	}
}

func execOutlivesItsContext(f *fixture) {
	box := f.create(f.spec())
	ctx, cancel := context.WithCancel(f.ctx)
	p, err := box.Exec(ctx, sandbox.Command{Args: []string{"cat"}})
	f.must(err)
	cancel()
	_, err = io.WriteString(p.Stdin(), "still here")
	f.must(err)
	f.must(p.Stdin().Close())
	raw, err := io.ReadAll(p.Stdout())
	f.must(err)
	if code, err := p.Wait(); string(raw) != "still here" || code != 0 || err != nil {
		f.Errorf("after its context ended: %q, code %d, %v", raw, code, err)
	}
}

func execKill(f *fixture) {
	box := f.create(f.spec())
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"sh", "-c", `echo up; sleep 1000 & wait`}})
	f.must(err)
	buf := make([]byte, 3)
	_, err = io.ReadFull(p.Stdout(), buf)
	f.must(err)
	f.must(p.Kill())
	code, err := p.Wait()
	f.must(err)
	if code != -1 {
		f.Errorf("code %d after Kill, want -1", code)
	}
	if n, err := p.Stdout().Read(buf); n != 0 || err == nil {
		f.Errorf("stdout returned %d bytes and %v after Kill", n, err)
	}
	f.must(p.Kill())
	if alive, err := box.Running(f.ctx); !alive || err != nil {
		f.Errorf("the sandbox runs: %v, %v", alive, err)
	}
}

func execRunner(f *fixture) {
	box := f.create(f.spec())
	out, errs, code := f.exec(box, sandbox.Command{Args: []string{"runner", "--help"}}, "")
	if code != 0 || !strings.Contains(out, "serve") {
		f.Errorf("runner --help: code %d, %s%s", code, out, errs)
	}
}

func environment(f *fixture) {
	box := f.create(f.spec())
	out, _, _ := f.exec(box, sandbox.Command{Args: []string{"env"}, Env: map[string]string{"GIVEN": "a b"}}, "")
	if strings.Contains(out, secret) || strings.Contains(out, "must-not-be-seen") {
		f.Errorf("the environment is inherited:\n%s", out)
	}
	vars := map[string]string{}
	for line := range strings.Lines(out) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		vars[k] = v
	}
	if vars["GIVEN"] != "a b" || vars["PATH"] == "" || vars["LANG"] == "" {
		f.Errorf("the environment lacks something:\n%s", out)
	}
	if home, _ := os.UserHomeDir(); vars["HOME"] == "" || vars["HOME"] == home {
		f.Errorf("HOME is %q", vars["HOME"])
	}
	if _, _, code := f.sh(box, `touch "$HOME/mine" && test -w "$HOME/mine"`); code != 0 {
		f.Error("HOME cannot be written")
	}
}

func dir(f *fixture) {
	box := f.create(f.spec())
	f.must(box.Files().Put(f.ctx, "sub/deep/file", strings.NewReader("x")))
	if out, _, code := f.exec(box, sandbox.Command{Args: []string{"cat", "file"}, Dir: "sub/deep"}, ""); out != "x" || code != 0 {
		f.Errorf("in a folder: %q, code %d", out, code)
	}
	if out, _, code := f.sh(box, "cat sub/deep/file"); out != "x" || code != 0 {
		f.Errorf("in the workspace: %q, code %d", out, code)
	}
	_, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: "../.."})
	f.want(err, sandbox.ErrOutside)
	_, err = box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: "nowhere"})
	f.want(err, sandbox.ErrNotFound)
}

func filesPutGet(f *fixture) {
	files := f.create(f.spec()).Files()
	body := make([]byte, 3<<20)
	_, err := rand.Read(body)
	f.must(err)
	for name, content := range map[string][]byte{"a": []byte("1"), "b/c/d.txt": body, "empty": nil, "späce and ünicode": []byte("2"), "./dot": []byte("3")} {
		f.must(files.Put(f.ctx, name, bytes.NewReader(content)))
		f.reads(files, name, content)
	}
	f.must(files.Put(f.ctx, "a", strings.NewReader("replaced")))
	f.reads(files, "a", []byte("replaced"))
	_, err = files.Get(f.ctx, "nothing")
	f.want(err, sandbox.ErrNotFound)
	_, err = files.Get(f.ctx, "b/nothing")
	f.want(err, sandbox.ErrNotFound)
	if _, err := files.Get(f.ctx, "b"); err == nil {
		f.Error("a folder was opened as a file")
	}
	broken := errors.New("the upload broke off")
	f.want(files.Put(f.ctx, "a", io.MultiReader(strings.NewReader("half"), errReader{broken})), broken)
	f.reads(files, "a", []byte("replaced"))
	all, err := files.List(f.ctx, "")
	f.must(err)
	if len(all) != 7 {
		f.Errorf("a broken upload left files: %+v", all)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func (f *fixture) reads(files sandbox.Files, name string, want []byte) {
	f.Helper()
	r, err := files.Get(f.ctx, name)
	f.must(err)
	got, err := io.ReadAll(r)
	f.must(errors.Join(err, r.Close()))
	if !bytes.Equal(got, want) {
		f.Errorf("%s has %d bytes, want %d", name, len(got), len(want))
	}
}

func filesList(f *fixture) {
	files := f.create(f.spec()).Files()
	empty, err := files.List(f.ctx, "")
	f.must(err)
	if len(empty) != 0 {
		f.Errorf("a new workspace has %+v", empty)
	}
	for _, name := range []string{"z", "a/b", "a/c/d", "a-b"} {
		f.must(files.Put(f.ctx, name, strings.NewReader("12345")))
	}
	paths := func(dir string) string {
		f.Helper()
		got, err := files.List(f.ctx, dir)
		f.must(err)
		var out []string
		for _, e := range got {
			if !e.Dir && (e.Size != 5 || time.Since(e.ModTime) > within) {
				f.Errorf("entry %+v", e)
			}
			out = append(out, e.Path+map[bool]string{true: "/"}[e.Dir])
		}
		return strings.Join(out, " ")
	}
	if got := paths(""); got != "a/ a-b a/b a/c/ a/c/d z" {
		f.Errorf("all: %s", got)
	}
	if got := paths("a"); got != "a/b a/c/ a/c/d" {
		f.Errorf("a: %s", got)
	}
	_, err = files.List(f.ctx, "nothing")
	f.want(err, sandbox.ErrNotFound)
}

func filesOutside(f *fixture) {
	files := f.create(f.spec()).Files()
	for _, name := range []string{"../x", "..", "a/../../x", "/etc/passwd", "a/../../workspace-evil/x"} {
		f.want(files.Put(f.ctx, name, strings.NewReader("x")), sandbox.ErrOutside)
		_, err := files.Get(f.ctx, name)
		f.want(err, sandbox.ErrOutside)
		_, err = files.List(f.ctx, name)
		f.want(err, sandbox.ErrOutside)
	}
	for _, name := range []string{"", "nul\x00", "."} {
		if err := files.Put(f.ctx, name, strings.NewReader("x")); err == nil {
			f.Errorf("%q was written", name)
		}
	}
}

func filesSymlinks(f *fixture) {
	box := f.create(f.spec())
	files := box.Files()
	f.must(files.Put(f.ctx, "inside", strings.NewReader("in")))
	_, _, code := f.sh(box, `ln -s /etc/passwd file && ln -s / root && ln -s .. up && ln -s inside good && ln -s "$(pwd)-evil" sibling && { mkdir -p "$(pwd)-evil" || true; }`)
	if code != 0 {
		f.Fatal("creating the symlinks in the sandbox failed")
	}
	defer f.sh(box, `rm -r "$(pwd)-evil"`)
	f.reads(files, "good", []byte("in"))
	for _, name := range []string{"file", "root/etc/passwd", "up/x", "sibling/x"} {
		_, err := files.Get(f.ctx, name)
		f.want(err, sandbox.ErrOutside)
	}
	for _, name := range []string{"root/tmp/spool-evil", "up/evil", "sibling/evil", "sibling/new/evil"} {
		f.want(files.Put(f.ctx, name, strings.NewReader("evil")), sandbox.ErrOutside)
	}
	// Put onto a symlink replaces the link, not the file to which it points.
	f.must(files.Put(f.ctx, "file", strings.NewReader("mine")))
	f.reads(files, "file", []byte("mine"))
	all, err := files.List(f.ctx, "")
	f.must(err)
	if len(all) > 6 {
		f.Errorf("the listing follows symlinks: %d entries", len(all))
	}
}

// terminateLeavesNoProcess starts processes that could outlive the sandbox: a child, a grandchild in its own session,
// and a daemon that has detached from its parents.
func terminateLeavesNoProcess(f *fixture) {
	spec := f.spec()
	box := f.create(spec)
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"sh", "-c", `
		sleep 1001 & echo $!
		setsid sh -c 'echo $$; exec sleep 1002' &
		(setsid sh -c 'trap "" TERM HUP; (trap "" TERM HUP; sleep 1003) & echo $!; exit 0' &)
		wait`}})
	f.must(err)
	var pids []int
	var text []byte
	buf := make([]byte, 64)
	for len(pids) < 3 {
		n, err := p.Stdout().Read(buf)
		f.must(err)
		text = append(text, buf[:n]...)
		pids = pids[:0]
		for line := range strings.Lines(string(text)) {
			pid, err := strconv.Atoi(strings.TrimSuffix(line, "\n"))
			if err == nil && strings.HasSuffix(line, "\n") {
				pids = append(pids, pid)
			}
		}
	}
	if f.s.Alive != nil {
		for _, pid := range pids {
			if !f.s.Alive(pid) {
				f.Errorf("process %d does not run before the end", pid)
			}
		}
	}
	f.must(f.p.Terminate(f.ctx, spec.ID, false))
	if f.s.Alive != nil {
		for _, pid := range pids {
			if f.s.Alive(pid) {
				f.Errorf("process %d outlives its sandbox", pid)
			}
		}
	}
	_, err = p.Wait()
	f.must(err)
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.want(err, sandbox.ErrNotFound)
	if alive, err := box.Running(f.ctx); alive || err != nil {
		f.Errorf("runs after its end: %v, %v", alive, err)
	}
	if _, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"true"}}); err == nil {
		f.Error("a command runs in a sandbox that was terminated")
	}
}

func terminateTwice(f *fixture) {
	spec := f.spec()
	f.create(spec)
	for range 2 {
		f.must(f.p.Terminate(f.ctx, spec.ID, false))
	}
	f.must(f.s.New(f).Terminate(f.ctx, f.id(events.KindSandbox), true))
}

func wipe(f *fixture) {
	spec := f.spec()
	f.must(f.create(spec).Files().Put(f.ctx, "private", strings.NewReader("x")))
	f.must(f.p.Terminate(f.ctx, spec.ID, true))
	spec.ID = f.id(events.KindSandbox)
	left, err := f.create(spec).Files().List(f.ctx, "")
	f.must(err)
	if len(left) != 0 {
		f.Errorf("the workspace was not wiped: %+v", left)
	}
}

// terminateOneOfTwo checks that terminating one sandbox does not affect another.
func terminateOneOfTwo(f *fixture) {
	a, b := f.spec(), f.spec()
	f.create(a)
	kept := f.create(b)
	f.must(kept.Files().Put(f.ctx, "mark", strings.NewReader("b")))
	f.must(f.p.Terminate(f.ctx, a.ID, true))
	if out, _, code := f.sh(kept, "cat mark"); out != "b" || code != 0 {
		f.Errorf("the other sandbox: %q, code %d", out, code)
	}
}
