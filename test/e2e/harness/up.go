package harness

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/spool/stack"
	"github.com/spoolhq/spool/services/executor"
)

// UpInstallation runs the spool program as on a new user's machine: in an empty folder, and with only the environment
// variables of a new installation.
type UpInstallation struct {
	t   testing.TB
	dir string
	env []string
}

// NewUpInstallation returns an UpInstallation in a new folder, whose sandboxes are processes of this machine.
func NewUpInstallation(t testing.TB) *UpInstallation {
	t.Helper()
	runner, err := buildRunner()
	requireNoError(t, err)
	dir := t.TempDir()
	return &UpInstallation{t: t, dir: dir, env: append(os.Environ(),
		"SPOOL_DATA_DIR="+filepath.Join(dir, "data"), "SPOOL_RUNNER="+runner, "SPOOL_LISTEN=127.0.0.1:0", "SPOOL_GRPC_LISTEN=127.0.0.1:0",
		"SPOOL_SANDBOX="+executor.ProviderLocal, "SPOOL_MOCK_LLM=true",
	)}
}

// DataDir returns the data folder of the installation.
func (u *UpInstallation) DataDir() string { return filepath.Join(u.dir, "data") }

// UpConnection is the address and the process of a running `spool up`.
type UpConnection struct {
	URL, PID string
}

// Connection reads how to reach the running `spool up`.
func (u *UpInstallation) Connection() UpConnection {
	u.t.Helper()
	c, err := stack.FindRunning(u.DataDir())
	requireNoError(u.t, err)
	return UpConnection{c.URL, strconv.Itoa(c.PID)}
}

// spoolCommand returns a command of the spool program with args. variables are environment variables, which override the
// settings.
func (u *UpInstallation) spoolCommand(variables []string, args ...string) *exec.Cmd {
	u.t.Helper()
	bin, err := buildCLI()
	requireNoError(u.t, err)
	cmd := exec.CommandContext(u.t.Context(), bin, args...)
	cmd.Dir, cmd.Env = u.dir, append(slices.Clone(u.env), variables...)
	return cmd
}

// RunCLI runs the spool program with args and returns its exit code and all its output. variables are environment
// variables, which override the settings.
func (u *UpInstallation) RunCLI(variables []string, args ...string) (code int, printed string) {
	u.t.Helper()
	cmd := u.spoolCommand(variables, args...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		u.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// RunWhileUp starts `spool up`, by default with its scripted model server, calls f when it is ready, and stops it. It fails the test if
// spool does not exit with 0.
func (u *UpInstallation) RunWhileUp(variables []string, f func()) {
	u.t.Helper()
	cmd := u.startUp(variables)
	defer func() {
		assertNoError(u.t, cmd.Process.Signal(syscall.SIGTERM))
		assertNoError(u.t, cmd.Wait())
	}()
	f()
}

// RunUntilKilled starts `spool up` as RunWhileUp does, and kills it with SIGKILL after f.
func (u *UpInstallation) RunUntilKilled(variables []string, f func()) {
	u.t.Helper()
	cmd := u.startUp(variables)
	defer func() {
		assertNoError(u.t, cmd.Process.Kill())
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) {
			u.t.Errorf("wait for the killed spool up: %v", err)
		}
	}()
	f()
}

// startUp starts `spool up`, and returns when it is ready.
func (u *UpInstallation) startUp(variables []string) *exec.Cmd {
	u.t.Helper()
	cmd := u.spoolCommand(variables, "up")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stderr = testWriter{u.t, "spool up"}
	out, err := cmd.StdoutPipe()
	requireNoError(u.t, err)
	requireNoError(u.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ready ") {
		assertNoError(u.t, cmd.Process.Signal(syscall.SIGTERM))
		assertNoError(u.t, cmd.Wait())
		u.t.Fatalf("spool up printed %q: %v", line, err)
	}
	return cmd
}
