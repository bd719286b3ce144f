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

// TestedProvider describes the sandbox provider that the test suite tests, and what it supports.
type TestedProvider struct {
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

// waitTimeout is the maximum time for which a test of the suite waits for an effect.
const waitTimeout = 30 * time.Second

// secretVariable is the name of an environment variable of the test process that sandboxes must not see.
const secretVariable = "SPOOL_SANDBOXTEST_SECRET"

// Exercise runs the conformance suite of sandbox providers. It sets a variable of the process, so the calling test
// must not be parallel.
func Exercise(t *testing.T, s TestedProvider) {
	t.Setenv(secretVariable, "must-not-be-seen")
	for _, c := range []struct {
		name string
		test func(*fixture)
	}{
		{"CreateTwice", testCreateTwice},
		{"AttachAnew", testAttachFromOtherProvider},
		{"AttachUnknown", testAttachUnknown},
		{"List", testList},
		{"ExecStreams", testExecStreams},
		{"ExecExitCodes", testExecExitCodes},
		{"ExecOutlivesItsContext", testExecOutlivesContext},
		{"ExecKill", testExecKill},
		{"ExecRunner", testExecRunner},
		{"Environment", testExecEnvironment},
		{"Dir", testExecDir},
		{"FilesPutGet", testFilesPutGet},
		{"FilesList", testFilesList},
		{"FilesOutside", testFilesOutside},
		{"FilesSymlinks", testFilesSymlinks},
		{"TerminateLeavesNoProcess", testTerminateLeavesNoProcess},
		{"TerminateTwice", testTerminateTwice},
		{"Wipe", testTerminateWipesWorkspace},
		{"Apart", testTerminateOneOfTwo},
		{"FilesRemove", testFilesRemove},
		{"ListOutside", testListOutside},
		{"CreateAgain", testCreateAfterKill},
		{"TakeOver", testWorkspaceHandover},
		{"Ended", testEndedContext},
	} {
		s.runTest(t, c.name, c.test)
	}
	p := s.New(t)
	if _, ok := p.(sandbox.Pauser); ok {
		s.runTest(t, "Pause", func(f *fixture) { testPause(f, f.p.(sandbox.Pauser)) })
	}
	if _, ok := p.(sandbox.Adopter); ok {
		s.runTest(t, "Adopt", func(f *fixture) { testAdopt(f, f.p.(sandbox.Adopter)) })
	}
}

// runTest runs one test of the suite, in parallel with the others.
func (s TestedProvider) runTest(t *testing.T, name string, test func(*fixture)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(context.Background(), 4*waitTimeout)
		t.Cleanup(cancel)
		test(&fixture{T: t, s: s, p: s.New(t), ctx: ctx})
	})
}

// fixture holds one running test of the suite, with a provider of its own.
type fixture struct {
	*testing.T
	s   TestedProvider
	p   sandbox.Provider
	ctx context.Context
}

// newID returns a new id of the given kind.
func (f *fixture) newID(kind events.IDKind) string {
	f.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	f.failOnError(err)
	return id
}

func (f *fixture) failOnError(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// checkError fails the test unless err is target, as errors.Is defines it.
func (f *fixture) checkError(err, target error) {
	f.Helper()
	if !errors.Is(err, target) {
		f.Errorf("error is %v, want %v", err, target)
	}
}

// newSpec returns the spec of a new sandbox for a new session.
func (f *fixture) newSpec() sandbox.Spec {
	f.Helper()
	return sandbox.Spec{ID: f.newID(events.KindSandbox), Labels: sandbox.Labels{
		Tenant: "default", Session: f.newID(events.KindSession), Engine: cmp.Or(f.s.Engine, "suite"), Epoch: 7,
	}}
}

// createSandbox creates a sandbox that is terminated when the test ends.
func (f *fixture) createSandbox(spec sandbox.Spec) sandbox.Sandbox {
	f.Helper()
	box, err := f.p.Create(f.ctx, spec)
	f.failOnError(err)
	f.Cleanup(func() {
		if err := f.p.Terminate(context.Background(), spec.ID, true); err != nil {
			f.Error(err)
		}
	})
	return box
}

// runShell runs a shell command and returns its output and exit code.
func (f *fixture) runShell(box sandbox.Sandbox, line string) (stdout, stderr string, code int) {
	f.Helper()
	return f.runCommand(box, sandbox.Command{Args: []string{"sh", "-c", line}}, "")
}

// runCommand runs a command with the given input, and returns its output and exit code.
func (f *fixture) runCommand(box sandbox.Sandbox, c sandbox.Command, stdin string) (stdout, stderr string, code int) {
	f.Helper()
	p, err := box.Exec(f.ctx, c)
	f.failOnError(err)
	errs := make(chan string, 1)
	go func() {
		raw, err := io.ReadAll(p.Stderr())
		if err != nil {
			f.Error(err)
		}
		errs <- string(raw)
	}()
	_, err = io.WriteString(p.Stdin(), stdin)
	f.failOnError(err)
	f.failOnError(p.Stdin().Close())
	raw, err := io.ReadAll(p.Stdout())
	f.failOnError(err)
	code, err = p.Wait()
	f.failOnError(err)
	return string(raw), <-errs, code
}
