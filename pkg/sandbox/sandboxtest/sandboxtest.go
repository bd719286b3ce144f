// Package sandboxtest is the conformance suite for sandbox providers.
package sandboxtest

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Subject describes the sandbox provider that the test suite tests.
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

// waitTimeout is the time limit of every wait of the suite.
const waitTimeout = 30 * time.Second

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
		{"Environment", execEnvironment},
		{"Dir", execDir},
		{"FilesPutGet", filesPutGet},
		{"FilesList", filesList},
		{"FilesOutside", filesOutside},
		{"FilesSymlinks", filesSymlinks},
		{"TerminateLeavesNoProcess", terminateLeavesNoProcess},
		{"TerminateTwice", terminateTwice},
		{"Wipe", terminateWipesWorkspace},
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

// run runs a test of the suite, in parallel with the others.
func (s Subject) run(t *testing.T, name string, test func(*fixture)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(context.Background(), 4*waitTimeout)
		t.Cleanup(cancel)
		test(&fixture{T: t, s: s, p: s.New(t), ctx: ctx})
	})
}

// fixture is a running test of the suite, with a provider of its own.
type fixture struct {
	*testing.T
	s   Subject
	p   sandbox.Provider
	ctx context.Context
}

// id returns a new id.
func (f *fixture) id(kind events.IDKind) string {
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

// checkError checks that err is target.
func (f *fixture) checkError(err, target error) {
	f.Helper()
	if !errors.Is(err, target) {
		f.Errorf("error is %v, want %v", err, target)
	}
}

// spec returns the spec of a new sandbox of a new session.
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

// exec runs a command with the given input, and returns its output and exit code.
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
