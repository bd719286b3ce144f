package sandboxtest

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// pauseWatch is the time that the suite watches a paused process for output.
const pauseWatch = 300 * time.Millisecond

func filesRemove(f *fixture) {
	box := f.create(f.spec())
	files := box.Files()
	for _, name := range []string{"a/b", "a/c/d", "e", "kept"} {
		f.must(files.Put(f.ctx, name, strings.NewReader("x")))
	}
	if _, _, code := f.sh(box, `ln -s kept link && ln -s / root && ln -s .. up && mkdir -p "$HOME/mine" && ln -s "$HOME/mine" out && touch "$HOME/mine/file" && mkdir empty`); code != 0 {
		f.Fatal("creating the links in the sandbox failed")
	}
	for _, name := range []string{"nothing", "a/nothing", "kept/nothing"} {
		err := files.Remove(f.ctx, name)
		if err == nil || errors.Is(err, sandbox.ErrOutside) || name != "kept/nothing" && !errors.Is(err, sandbox.ErrNotFound) {
			f.Errorf("remove %s: %v", name, err)
		}
	}
	for _, name := range []string{"../x", "..", "/etc/passwd", "a/../../x", "root/etc/passwd", "up/x", "out/file"} {
		f.want(files.Remove(f.ctx, name), sandbox.ErrOutside)
	}
	for _, name := range []string{"", ".", "nul\x00"} {
		if err := files.Remove(f.ctx, name); err == nil {
			f.Errorf("%q was removed", name)
		}
	}
	// Remove removes a link itself, not the file to which it points.
	for _, name := range []string{"a", "e", "link", "root", "up", "out", "empty"} {
		f.must(files.Remove(f.ctx, name))
	}
	left, err := files.List(f.ctx, "")
	f.must(err)
	if len(left) != 1 || left[0].Path != "kept" {
		f.Errorf("remaining files: %+v", left)
	}
	if _, _, code := f.sh(box, `test -e "$HOME/mine/file" && test -e /etc/passwd`); code != 0 {
		f.Error("the target of a link was removed")
	}
}

// listOutside tests listings that follow the links that filesSymlinks leaves out.
func listOutside(f *fixture) {
	box := f.create(f.spec())
	if _, _, code := f.sh(box, `mkdir -p in/side && touch in/side/file && ln -s / root && ln -s .. up && ln -s in alias && ln -s "$(pwd)/in" absolute`); code != 0 {
		f.Fatal("creating the links in the sandbox failed")
	}
	for _, name := range []string{"root", "root/etc", "up", "root/proc/self/cwd"} {
		if _, err := box.Files().List(f.ctx, name); !errors.Is(err, sandbox.ErrOutside) {
			// The listing of a link may succeed, but it must contain nothing below the link.
			if got, _ := box.Files().List(f.ctx, name); err != nil || len(got) > 0 {
				f.Errorf("list %s: %d entries, %v", name, len(got), err)
			}
		}
	}
	for _, name := range []string{"root", "up"} {
		_, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: name + "/etc"})
		f.want(err, sandbox.ErrOutside)
	}
	if out, _, code := f.exec(box, sandbox.Command{Args: []string{"ls"}, Dir: "alias/side"}, ""); out != "file\n" || code != 0 {
		f.Errorf("in a folder behind a link that stays inside: %q, code %d", out, code)
	}
}

// pause pauses a process in the middle of its work, and checks that it continues after Resume.
func pause(f *fixture, p sandbox.Pauser) {
	spec := f.spec()
	box := f.create(spec)
	proc, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.must(err)
	echo := make(chan string, 16)
	go func() {
		defer close(echo)
		buf := make([]byte, 16)
		for {
			n, err := proc.Stdout().Read(buf)
			if err != nil {
				return
			}
			echo <- string(buf[:n])
		}
	}()
	say := func(word string) {
		_, err := io.WriteString(proc.Stdin(), word)
		f.must(err)
	}
	say("one")
	if got := <-echo; got != "one" {
		f.Fatalf("echo %q", got)
	}
	for range 2 {
		f.must(p.Pause(f.ctx, spec.ID))
	}
	if i := f.listedInfo(spec.ID); !i.Paused || !i.Running {
		f.Errorf("a paused sandbox is listed as %+v", i)
	}
	if alive, err := box.Running(f.ctx); !alive || err != nil {
		f.Errorf("a paused sandbox is running: %v, %v", alive, err)
	}
	if _, err := f.p.Attach(f.ctx, spec.ID); err != nil {
		f.Errorf("attach to a paused sandbox: %v", err)
	}
	say("two")
	select {
	case got := <-echo:
		f.Errorf("a paused process wrote %q", got)
	case <-time.After(pauseWatch):
	}
	for range 2 {
		f.must(p.Resume(f.ctx, spec.ID))
	}
	if got := <-echo; got != "two" {
		f.Errorf("after Resume: echo %q", got)
	}
	if i := f.listedInfo(spec.ID); i.Paused || !i.Running {
		f.Errorf("a resumed sandbox is listed as %+v", i)
	}
	f.must(proc.Stdin().Close())
	if code, err := proc.Wait(); code != 0 || err != nil {
		f.Errorf("exit code %d, %v", code, err)
	}
	unknown := f.id(events.KindSandbox)
	f.want(p.Pause(f.ctx, unknown), sandbox.ErrNotFound)
	f.want(p.Resume(f.ctx, unknown), sandbox.ErrNotFound)
	// A paused sandbox can be terminated like any other.
	f.must(p.Pause(f.ctx, spec.ID))
	f.must(f.p.Terminate(f.ctx, spec.ID, false))
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.want(err, sandbox.ErrNotFound)
}

// adopt assigns a sandbox without a session to a session, and then to a later epoch.
func adopt(f *fixture, p sandbox.Adopter) {
	spec := f.spec()
	session := spec.Labels
	spec.Labels = sandbox.Labels{Engine: session.Engine, Executor: f.id(events.KindExecutor)}
	box := f.create(spec)
	if i := f.listedInfo(spec.ID); i.Labels != spec.Labels {
		f.Errorf("a pooled sandbox is listed as %+v", i)
	}
	f.must(box.Files().Put(f.ctx, "mark", strings.NewReader("pool")))
	for _, epoch := range []uint64{7, 7, 8} {
		session.Epoch = epoch
		f.must(p.Adopt(f.ctx, spec.ID, session))
		if i := f.listedInfo(spec.ID); i.Labels != session || !i.Running {
			f.Errorf("an adopted sandbox is listed as %+v, want %+v", i, session)
		}
	}
	again, err := f.s.New(f).Attach(f.ctx, spec.ID)
	f.must(err)
	f.reads(again.Files(), "mark", []byte("pool"))
	spec.Labels = session
	found, err := f.p.Create(f.ctx, spec)
	f.must(err)
	f.reads(found.Files(), "mark", []byte("pool"))
	f.want(p.Adopt(f.ctx, f.id(events.KindSandbox), session), sandbox.ErrNotFound)
	if err := p.Adopt(f.ctx, spec.ID, sandbox.Labels{Tenant: "a.b", Session: "../x", Engine: session.Engine}); err == nil {
		f.Error("invalid labels were accepted")
	}
	f.must(f.p.Terminate(f.ctx, spec.ID, true))
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.want(err, sandbox.ErrNotFound)
}

// createAgain calls Create for a sandbox whose runner was killed. Create starts the runner again, or creates a new
// sandbox if the old one ended with its runner.
func createAgain(f *fixture) {
	spec := f.spec()
	f.must(f.create(spec).Files().Put(f.ctx, "mark", strings.NewReader("kept")))
	f.s.KillRunner(f, spec.ID)
	_, err := f.p.Attach(f.ctx, spec.ID)
	f.want(err, sandbox.ErrNotFound)
	if f.s.EndsWithRunner {
		infos, err := f.s.New(f).List(f.ctx)
		f.must(err)
		if slices.ContainsFunc(infos, func(i sandbox.Info) bool { return i.ID == spec.ID }) {
			f.Errorf("the sandbox is listed after its end: %+v", infos)
		}
	} else if i := f.listedInfo(spec.ID); i.Running {
		f.Errorf("a sandbox without a runner is listed as %+v", i)
	}
	box, err := f.s.New(f).Create(f.ctx, spec)
	f.must(err)
	if f.s.EndsWithRunner {
		left, err := box.Files().List(f.ctx, "")
		f.must(err)
		if len(left) != 0 {
			f.Errorf("the new sandbox has %+v", left)
		}
	} else {
		f.reads(box.Files(), "mark", []byte("kept"))
	}
	f.checkKept(box, !f.s.EndsWithRunner)
	if alive, err := box.Running(f.ctx); !alive || err != nil {
		f.Errorf("running after Create: %v, %v", alive, err)
	}
}

// takeOver hands a workspace from one sandbox of a session to the next, and from that one to a third.
func takeOver(f *fixture) {
	spec := f.spec()
	box := f.create(spec)
	f.checkKept(box, false)
	f.must(box.Files().Put(f.ctx, "mark", strings.NewReader("0")))
	for _, mark := range []string{"1", "2"} {
		f.must(f.p.Terminate(f.ctx, spec.ID, false))
		spec.Workspace, spec.ID = spec.ID, f.id(events.KindSandbox)
		next := f.create(spec)
		f.checkKept(next, true)
		left, err := next.Files().List(f.ctx, "")
		f.must(err)
		if len(left) != 1 {
			f.Errorf("the next sandbox has %+v", left)
		}
		f.must(next.Files().Put(f.ctx, "mark", strings.NewReader(mark)))
		f.reads(next.Files(), "mark", []byte(mark))
	}
	// A workspace that never existed, or was removed, cannot be taken over.
	f.must(f.p.Terminate(f.ctx, spec.ID, true))
	for _, from := range []string{spec.ID, f.id(events.KindSandbox)} {
		next := f.spec()
		next.Workspace = from
		fresh := f.create(next)
		f.checkKept(fresh, false)
		left, err := fresh.Files().List(f.ctx, "")
		f.must(err)
		if len(left) != 0 {
			f.Errorf("a workspace that does not exist has %+v", left)
		}
	}
}

// checkKept checks whether a sandbox reports that its workspace was kept, if it reports that.
func (f *fixture) checkKept(box sandbox.Sandbox, want bool) {
	f.Helper()
	if r, ok := box.(sandbox.Restorer); ok && r.Kept() != want {
		f.Errorf("kept is %v, want %v", r.Kept(), want)
	}
}

// listedInfo returns a sandbox as the provider lists it.
func (f *fixture) listedInfo(id string) sandbox.Info {
	f.Helper()
	infos, err := f.s.New(f).List(f.ctx)
	f.must(err)
	i := slices.IndexFunc(infos, func(i sandbox.Info) bool { return i.ID == id })
	if i < 0 {
		f.Fatalf("sandbox %s is not listed", id)
	}
	return infos[i]
}

// endedContext returns a context that has ended.
func endedContext() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// afterContextEnded checks that a call with an ended context returns the context's error and changes nothing.
func afterContextEnded(f *fixture) {
	spec := f.spec()
	box := f.create(spec)
	f.must(box.Files().Put(f.ctx, "mark", strings.NewReader("1")))
	_, err := box.Exec(endedContext(), sandbox.Command{Args: []string{"true"}})
	f.want(err, context.Canceled)
	f.want(box.Files().Put(endedContext(), "mark", strings.NewReader("2")), context.Canceled)
	_, err = box.Files().List(endedContext(), "")
	f.want(err, context.Canceled)
	f.reads(box.Files(), "mark", []byte("1"))
}
