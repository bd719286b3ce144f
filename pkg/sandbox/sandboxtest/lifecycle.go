package sandboxtest

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// testCreateTwice checks that a second Create with the same id, by another Provider value, returns the first sandbox.
func testCreateTwice(f *fixture) {
	spec := f.newSpec()
	first := f.createSandbox(spec)
	f.failOnError(first.Files().Put(f.ctx, "mark", strings.NewReader("1")))
	again, err := f.p.Create(f.ctx, spec)
	f.failOnError(err)
	if again.ID() != spec.ID || first.ID() != spec.ID {
		f.Errorf("ids %s and %s, want %s", first.ID(), again.ID(), spec.ID)
	}
	if out, _, _ := f.runShell(again, "cat mark"); out != "1" {
		f.Errorf("the second Create did not return the first sandbox: mark is %q", out)
	}
	alive, err := again.Running(f.ctx)
	f.failOnError(err)
	if !alive {
		f.Error("not running after Create")
	}
	infos, err := f.p.List(f.ctx)
	f.failOnError(err)
	if n := len(slices.DeleteFunc(infos, func(i sandbox.Info) bool { return i.ID != spec.ID })); n != 1 {
		f.Errorf("listed %d times", n)
	}
}

// testCreateAfterKill checks that Create, for a sandbox whose runner was killed, starts the runner again, or creates a
// new sandbox if the old one ended with its runner.
func testCreateAfterKill(f *fixture) {
	spec := f.newSpec()
	f.failOnError(f.createSandbox(spec).Files().Put(f.ctx, "mark", strings.NewReader("kept")))
	f.s.KillRunner(f, spec.ID)
	_, err := f.p.Attach(f.ctx, spec.ID)
	f.checkError(err, sandbox.ErrNotFound)
	if f.s.EndsWithRunner {
		infos, err := f.s.New(f).List(f.ctx)
		f.failOnError(err)
		if slices.ContainsFunc(infos, func(i sandbox.Info) bool { return i.ID == spec.ID }) {
			f.Errorf("the sandbox is listed after its end: %+v", infos)
		}
	} else if i := f.listedInfo(spec.ID); i.Running {
		f.Errorf("a sandbox without a runner is listed as %+v", i)
	}
	box, err := f.s.New(f).Create(f.ctx, spec)
	f.failOnError(err)
	if f.s.EndsWithRunner {
		left, err := box.Files().List(f.ctx, "")
		f.failOnError(err)
		if len(left) != 0 {
			f.Errorf("the new sandbox has %+v", left)
		}
	} else {
		f.checkContent(box.Files(), "mark", []byte("kept"))
	}
	f.checkWorkspaceKept(box, !f.s.EndsWithRunner)
	if alive, err := box.Running(f.ctx); !alive || err != nil {
		f.Errorf("running after Create: %v, %v", alive, err)
	}
}

// testAttachFromOtherProvider checks that another Provider value of the same engine can attach to a sandbox.
func testAttachFromOtherProvider(f *fixture) {
	spec := f.newSpec()
	f.failOnError(f.createSandbox(spec).Files().Put(f.ctx, "mark", strings.NewReader("2")))
	box, err := f.s.New(f).Attach(f.ctx, spec.ID)
	f.failOnError(err)
	if out, _, code := f.runShell(box, "cat mark"); out != "2" || code != 0 || box.ID() != spec.ID {
		f.Errorf("attached to %s: mark %q, code %d", box.ID(), out, code)
	}
}

// testAttachUnknown checks that Attach returns ErrNotFound for a sandbox that does not exist.
func testAttachUnknown(f *fixture) {
	_, err := f.p.Attach(f.ctx, f.newID(events.KindSandbox))
	f.checkError(err, sandbox.ErrNotFound)
	_, err = f.p.Attach(f.ctx, "../../etc")
	f.checkError(err, sandbox.ErrNotFound)
}

// testList checks that List returns each sandbox once, with its labels.
func testList(f *fixture) {
	a, b := f.newSpec(), f.newSpec()
	f.createSandbox(a)
	f.createSandbox(b)
	infos, err := f.s.New(f).List(f.ctx)
	f.failOnError(err)
	for _, spec := range []sandbox.Spec{a, b} {
		i := slices.IndexFunc(infos, func(i sandbox.Info) bool { return i.ID == spec.ID })
		if i < 0 || infos[i].Labels != spec.Labels || !infos[i].Running || time.Since(infos[i].Created) > waitTimeout {
			f.Errorf("%s is listed as %+v", spec.ID, infos)
		}
	}
	f.failOnError(f.p.Terminate(f.ctx, a.ID, true))
	infos, err = f.p.List(f.ctx)
	f.failOnError(err)
	if slices.ContainsFunc(infos, func(i sandbox.Info) bool { return i.ID == a.ID }) {
		f.Error("listed after it was terminated")
	}
}

// pauseWatchTime is the time that the suite watches a paused process for output.
const pauseWatchTime = 300 * time.Millisecond

// testPause pauses a sandbox while a process works in it, and checks that the process stops and continues after Resume.
func testPause(f *fixture, p sandbox.Pauser) {
	spec := f.newSpec()
	box := f.createSandbox(spec)
	proc, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"cat"}})
	f.failOnError(err)
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
		f.failOnError(err)
	}
	say("one")
	if got := <-echo; got != "one" {
		f.Fatalf("echo %q", got)
	}
	for range 2 {
		f.failOnError(p.Pause(f.ctx, spec.ID))
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
	case <-time.After(pauseWatchTime):
	}
	for range 2 {
		f.failOnError(p.Resume(f.ctx, spec.ID))
	}
	if got := <-echo; got != "two" {
		f.Errorf("after Resume: echo %q", got)
	}
	if i := f.listedInfo(spec.ID); i.Paused || !i.Running {
		f.Errorf("a resumed sandbox is listed as %+v", i)
	}
	f.failOnError(proc.Stdin().Close())
	if code, err := proc.Wait(); code != 0 || err != nil {
		f.Errorf("exit code %d, %v", code, err)
	}
	unknown := f.newID(events.KindSandbox)
	f.checkError(p.Pause(f.ctx, unknown), sandbox.ErrNotFound)
	f.checkError(p.Resume(f.ctx, unknown), sandbox.ErrNotFound)
	// A paused sandbox can be terminated like any other.
	f.failOnError(p.Pause(f.ctx, spec.ID))
	f.failOnError(f.p.Terminate(f.ctx, spec.ID, false))
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.checkError(err, sandbox.ErrNotFound)
}

// testAdopt checks that Adopt assigns a pooled sandbox to a session, and then to a later epoch of that session.
func testAdopt(f *fixture, p sandbox.Adopter) {
	spec := f.newSpec()
	session := spec.Labels
	spec.Labels = sandbox.Labels{Engine: session.Engine, Executor: f.newID(events.KindExecutor)}
	box := f.createSandbox(spec)
	if i := f.listedInfo(spec.ID); i.Labels != spec.Labels {
		f.Errorf("a pooled sandbox is listed as %+v", i)
	}
	f.failOnError(box.Files().Put(f.ctx, "mark", strings.NewReader("pool")))
	for _, epoch := range []uint64{7, 7, 8} {
		session.Epoch = epoch
		f.failOnError(p.Adopt(f.ctx, spec.ID, session))
		if i := f.listedInfo(spec.ID); i.Labels != session || !i.Running {
			f.Errorf("an adopted sandbox is listed as %+v, want %+v", i, session)
		}
	}
	again, err := f.s.New(f).Attach(f.ctx, spec.ID)
	f.failOnError(err)
	f.checkContent(again.Files(), "mark", []byte("pool"))
	spec.Labels = session
	found, err := f.p.Create(f.ctx, spec)
	f.failOnError(err)
	f.checkContent(found.Files(), "mark", []byte("pool"))
	f.checkError(p.Adopt(f.ctx, f.newID(events.KindSandbox), session), sandbox.ErrNotFound)
	if err := p.Adopt(f.ctx, spec.ID, sandbox.Labels{Tenant: "a.b", Session: "../x", Engine: session.Engine}); err == nil {
		f.Error("invalid labels were accepted")
	}
	f.failOnError(f.p.Terminate(f.ctx, spec.ID, true))
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.checkError(err, sandbox.ErrNotFound)
}

// testWorkspaceHandover checks that the workspace of a session is handed over from one sandbox to the next, and from
// that one to a third.
func testWorkspaceHandover(f *fixture) {
	spec := f.newSpec()
	box := f.createSandbox(spec)
	f.checkWorkspaceKept(box, false)
	f.failOnError(box.Files().Put(f.ctx, "mark", strings.NewReader("0")))
	for _, mark := range []string{"1", "2"} {
		f.failOnError(f.p.Terminate(f.ctx, spec.ID, false))
		spec.Workspace, spec.ID = spec.ID, f.newID(events.KindSandbox)
		next := f.createSandbox(spec)
		f.checkWorkspaceKept(next, true)
		left, err := next.Files().List(f.ctx, "")
		f.failOnError(err)
		if len(left) != 1 {
			f.Errorf("the next sandbox has %+v", left)
		}
		f.failOnError(next.Files().Put(f.ctx, "mark", strings.NewReader(mark)))
		f.checkContent(next.Files(), "mark", []byte(mark))
	}
	// A workspace that never existed, or was removed, cannot be taken over.
	f.failOnError(f.p.Terminate(f.ctx, spec.ID, true))
	for _, from := range []string{spec.ID, f.newID(events.KindSandbox)} {
		next := f.newSpec()
		next.Workspace = from
		fresh := f.createSandbox(next)
		f.checkWorkspaceKept(fresh, false)
		left, err := fresh.Files().List(f.ctx, "")
		f.failOnError(err)
		if len(left) != 0 {
			f.Errorf("a workspace that does not exist has %+v", left)
		}
	}
}

// checkWorkspaceKept fails the test if a sandbox reports whether its workspace was kept, and the report is not want.
func (f *fixture) checkWorkspaceKept(box sandbox.Sandbox, want bool) {
	f.Helper()
	if r, ok := box.(sandbox.WorkspaceReporter); ok && r.HasWorkspace() != want {
		f.Errorf("kept is %v, want %v", r.HasWorkspace(), want)
	}
}

// listedInfo returns the Info with which the provider lists a sandbox.
func (f *fixture) listedInfo(id string) sandbox.Info {
	f.Helper()
	infos, err := f.s.New(f).List(f.ctx)
	f.failOnError(err)
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

// testEndedContext checks that a call with an ended context returns the context's error and changes nothing.
func testEndedContext(f *fixture) {
	spec := f.newSpec()
	box := f.createSandbox(spec)
	f.failOnError(box.Files().Put(f.ctx, "mark", strings.NewReader("1")))
	_, err := box.Exec(endedContext(), sandbox.Command{Args: []string{"true"}})
	f.checkError(err, context.Canceled)
	f.checkError(box.Files().Put(endedContext(), "mark", strings.NewReader("2")), context.Canceled)
	_, err = box.Files().List(endedContext(), "")
	f.checkError(err, context.Canceled)
	f.checkContent(box.Files(), "mark", []byte("1"))
}
