package harness

import (
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"
)

// buildSession builds the session service once for all tests of a process, and returns the path of the program.
var buildSession = sync.OnceValues(func() (string, error) {
	return buildProgram("github.com/spoolhq/spool/services/session/cmd/session", "session")
})

// SessionProcess is a copy of the session service that runs in a process of its own.
type SessionProcess struct {
	t   testing.TB
	cmd *exec.Cmd
}

// StartSessionProcess starts one more copy of the session service, in a process of its own, which can be frozen. The process ends
// with the test. It needs Options.Outages, because the process has no NATS user.
func (c *Cluster) StartSessionProcess() *SessionProcess {
	c.T.Helper()
	binary, err := buildSession()
	requireNoError(c.T, err)
	p := &SessionProcess{t: c.T, cmd: exec.Command(binary, "--metrics-listen=127.0.0.1:0")}
	p.cmd.Env = append(os.Environ(), "SPOOL_NATS_URL="+c.Outage.nats.URL())
	requireNoError(c.T, p.cmd.Start())
	done := make(chan error, 1)
	go func() { done <- p.cmd.Wait() }()
	c.T.Cleanup(func() {
		p.Continue()
		assertNoError(c.T, p.cmd.Process.Signal(syscall.SIGTERM))
		select {
		case err := <-done:
			assertNoError(c.T, err)
		case <-time.After(WaitTimeout):
			assertNoError(c.T, p.cmd.Process.Kill())
			c.T.Errorf("the session service still ran after %s: %v", WaitTimeout, <-done)
		}
	})
	return p
}

// Freeze sends SIGSTOP to the process, which does nothing more until Continue.
func (p *SessionProcess) Freeze() { assertNoError(p.t, p.cmd.Process.Signal(syscall.SIGSTOP)) }

// Continue sends SIGCONT to the process.
func (p *SessionProcess) Continue() { assertNoError(p.t, p.cmd.Process.Signal(syscall.SIGCONT)) }
