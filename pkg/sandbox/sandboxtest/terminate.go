package sandboxtest

import (
	"strconv"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// testTerminateLeavesNoProcess checks that Terminate ends processes that could outlive the sandbox: a child, a
// grandchild in its own session, and a daemon that has detached from its parents.
func testTerminateLeavesNoProcess(f *fixture) {
	spec := f.newSpec()
	box := f.createSandbox(spec)
	p, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"sh", "-c", `
		sleep 1001 & echo $!
		setsid sh -c 'echo $$; exec sleep 1002' &
		(setsid sh -c 'trap "" TERM HUP; (trap "" TERM HUP; sleep 1003) & echo $!; exit 0' &)
		wait`}})
	f.failOnError(err)
	var pids []int
	var text []byte
	buf := make([]byte, 64)
	for len(pids) < 3 {
		n, err := p.Stdout().Read(buf)
		f.failOnError(err)
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
	f.failOnError(f.p.Terminate(f.ctx, spec.ID, false))
	if f.s.Alive != nil {
		for _, pid := range pids {
			if f.s.Alive(pid) {
				f.Errorf("process %d outlives its sandbox", pid)
			}
		}
	}
	_, err = p.Wait()
	f.failOnError(err)
	_, err = f.p.Attach(f.ctx, spec.ID)
	f.checkError(err, sandbox.ErrNotFound)
	if alive, err := box.Running(f.ctx); alive || err != nil {
		f.Errorf("runs after its end: %v, %v", alive, err)
	}
	if _, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"true"}}); err == nil {
		f.Error("a command runs in a sandbox that was terminated")
	}
}

// testTerminateTwice checks that Terminate returns no error for a sandbox that does not exist any more.
func testTerminateTwice(f *fixture) {
	spec := f.newSpec()
	f.createSandbox(spec)
	for range 2 {
		f.failOnError(f.p.Terminate(f.ctx, spec.ID, false))
	}
	f.failOnError(f.s.New(f).Terminate(f.ctx, f.newID(events.KindSandbox), true))
}

// testTerminateOneOfTwo checks that terminating one sandbox does not affect another.
func testTerminateOneOfTwo(f *fixture) {
	a, b := f.newSpec(), f.newSpec()
	f.createSandbox(a)
	kept := f.createSandbox(b)
	f.failOnError(kept.Files().Put(f.ctx, "mark", strings.NewReader("b")))
	f.failOnError(f.p.Terminate(f.ctx, a.ID, true))
	if out, _, code := f.runShell(kept, "cat mark"); out != "b" || code != 0 {
		f.Errorf("the other sandbox: %q, code %d", out, code)
	}
}

// testTerminateWipesWorkspace checks that a workspace is empty again after Terminate has wiped it.
func testTerminateWipesWorkspace(f *fixture) {
	spec := f.newSpec()
	f.failOnError(f.createSandbox(spec).Files().Put(f.ctx, "private", strings.NewReader("x")))
	f.failOnError(f.p.Terminate(f.ctx, spec.ID, true))
	spec.ID = f.newID(events.KindSandbox)
	left, err := f.createSandbox(spec).Files().List(f.ctx, "")
	f.failOnError(err)
	if len(left) != 0 {
		f.Errorf("the workspace was not wiped: %+v", left)
	}
}
