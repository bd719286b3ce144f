package harness

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// buildCLI builds the spool program once for all tests of a process, and returns its path.
var buildCLI = sync.OnceValues(func() (string, error) {
	return buildProgram("github.com/spoolhq/spool/cmd/spool", "spool")
})

// RunCLI runs the spool program in a folder, without a terminal, as a client of gateway 0. It returns the exit code,
// the standard output (out) and the standard error (says). data is the folder for spool's own files.
func (c *Cluster) RunCLI(t testing.TB, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	return c.RunCLIAs(t, nil, folder, data, args...)
}

// RunCLIAs is like RunCLI, but runs the program as another user of the machine; nil means the user of the test.
func (c *Cluster) RunCLIAs(t testing.TB, user *syscall.Credential, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := c.cliCommand(t, folder, data, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if user != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: user}
		cmd.Env = append(cmd.Env, "HOME="+data)
	}
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

// cliCommand returns a command of the spool program as a client of gateway 0. folder is its working directory, data the
// folder for spool's own files.
func (c *Cluster) cliCommand(t testing.TB, folder, data string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := buildCLI()
	requireNoError(t, err)
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Dir, cmd.Env = folder, append(os.Environ(), "SPOOL_URL="+c.URL(0), "SPOOL_DATA_DIR="+data, "PWD="+folder)
	return cmd
}

// UnprivilegedUser returns a user of the machine who cannot read root's files, and two folders of this user: one to
// work in, and one for spool's own files. It skips the test unless it runs as root.
func UnprivilegedUser(t testing.TB) (user *syscall.Credential, folder, data string) {
	t.Helper()
	const id = 65534
	if os.Geteuid() != 0 {
		t.Skip("only root can run a program as another user")
	}
	for _, dir := range []*string{&folder, &data} {
		var err error
		*dir, err = os.MkdirTemp("", strings.ReplaceAll(t.Name(), "/", "_")) //nolint:usetesting // only root may enter the parents of t.TempDir
		requireNoError(t, err)
		t.Cleanup(func() { assertNoError(t, os.RemoveAll(*dir)) })
		requireNoError(t, os.Chown(*dir, id, id))
	}
	return &syscall.Credential{Uid: id, Gid: id}, folder, data
}
