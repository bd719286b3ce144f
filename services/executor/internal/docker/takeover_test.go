package docker

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// hostile is an agent that tries every way to reach its runner: through a child that connects, passes the connection by
// SCM_RIGHTS and ends, through an orphan that does so, through /proc, and finally by listening in the runner's place.
const hostile = `
import os, socket, time
S = "/spool/run/runner.sock"
out = open("/workspace/report", "w")
def steal(orphan):
    a, b = socket.socketpair()
    child = os.fork()
    if child == 0:
        if orphan and os.fork():
            os._exit(0)
        c = socket.socket(socket.AF_UNIX)
        c.connect(S)
        socket.send_fds(b, [b"%8d" % os.getpid()], [c.fileno()])
        os._exit(0)
    os.waitpid(child, 0)
    pid, fds, _, _ = socket.recv_fds(a, 8, 1)
    while os.path.exists("/proc/%d" % int(pid)):
        time.sleep(.01)
    return socket.socket(fileno=fds[0])
for orphan in False, True:
    for line in '{"epoch":18446744073709551615,"after":0}', '{"id":1,"op":"claim","secret":"mine"}', '{"id":1,"op":"interrupt"}':
        c = steal(orphan)
        c.sendall(line.encode() + b"\n")
        print(c.recv(4096).decode(), file=out)
for name in "mem", "environ", "maps", "fd/0":
    try:
        open("/proc/1/" + name, "rb").read(1)
        print("read", name, file=out)
    except PermissionError:
        print("denied", file=out)
os.rename(S, S + ".real")
l = socket.socket(socket.AF_UNIX)
l.bind(S)
l.listen()
out.close()
os.rename("/workspace/report", "/workspace/done")
c, _ = l.accept()
heard = c.recv(1 << 16)
c.close()
os.rename(S + ".real", S)
open("/workspace/heard", "wb").write(heard)
while True:
    time.sleep(1000)
`

// An agent that tries every way to reach its runner learns nothing, fences no executor, and does not keep an executor
// from following.
func TestTakeover_OfTheRunnerByItsAgent(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	p := provide(t, cfg)
	if _, err := p.api.ImageInspect(t.Context(), fullImage); err != nil {
		t.Skipf("image %s is not on the engine (scripts/images makes it): %v", fullImage, err)
	}
	spec := newSpec(t)
	spec.Image = fullImage
	b := create(t, p, spec)
	if err := b.Files().Put(t.Context(), "hostile.py", strings.NewReader(hostile)); err != nil {
		t.Fatal(err)
	}
	proc, stream := attached(t, b)
	execution := newID(t, events.KindExecution)
	if err := json.NewEncoder(stream).Encode(runner.Command{ID: 1, Op: runner.OpStart, Epoch: 1, Query: &runner.Query{
		SessionID: spec.Labels.Session, ExecutionID: execution, Attempt: 1, Architecture: "acp", Content: "take over",
		Command: []string{"python3", "/workspace/hostile.py"},
	}}); err != nil {
		t.Fatal(err)
	}
	if out, errs, code := sh(t, b, `for i in $(seq 600); do test -e done && break; sleep .1; done; cat done`); code != 0 || strings.Count(out, "FORBIDDEN") != 6 || strings.Count(out, "denied") != 4 || strings.Contains(out, "read") {
		t.Errorf("the agent got %s (%s)", out, errs)
	}
	// The agent listens in the runner's place: the next executor detects that, and sends it nothing.
	found, err := p.Attach(t.Context(), spec.ID)
	if err != nil {
		t.Fatal(err)
	}
	again, err := found.Exec(t.Context(), sandbox.Command{Args: []string{"runner", "attach", "--sealed"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := runner.OpenSealedStream(found.Secret(), again.Stdout(), again.Stdin()); err == nil {
		t.Error("the executor takes the agent for the runner")
	}
	if out, _, _ := sh(t, b, `for i in $(seq 600); do test -e heard && break; sleep .1; done; cat heard; tr '\0' '\n' </proc/*/environ 2>/dev/null`); strings.Contains(out, b.secret) || b.secret == "" {
		t.Error("the agent has the sandbox's secret")
	}
	next, stream2 := attached(t, found) // with the epoch of the first
	in := json.NewDecoder(stream2)
	first := uint64(0)
	for first == 0 {
		var m runner.Message
		if err := in.Decode(&m); err != nil {
			t.Fatal(err)
		}
		if m.Line != nil {
			first = m.Line.N
		}
	}
	if first != 1 {
		t.Errorf("the journal begins with line %d", first)
	}
	for _, proc := range []sandbox.Process{proc, again, next} {
		if err := proc.Kill(); err != nil {
			t.Error(err)
		}
	}
}

// A runner that is stopped by a signal from outside is ended with its sandbox.
func TestTerminate_OfAStoppedRunner(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	b := create(t, p, spec)
	proc, _ := attached(t, b)
	got, err := callEngine(t.Context(), p, "look", func(ctx context.Context) (container.InspectResponse, error) {
		return p.api.ContainerInspect(ctx, b.container)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(got.State.Pid, syscall.SIGSTOP); err != nil {
		t.Fatalf("stop the runner: %v", err)
	}
	if err := p.Terminate(t.Context(), spec.ID, false); err != nil {
		t.Error(err)
	}
	if _, err := p.Attach(t.Context(), spec.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attach after the end: %v", err)
	}
	if _, err := proc.Wait(); err != nil {
		t.Error(err)
	}
}
