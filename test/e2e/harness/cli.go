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

// CLI runs the spool program in a folder, without a terminal, as a client of gateway 0. It returns the exit code, the
// standard output and the standard error. data is the folder for spool's own files.
func (c *Cluster) CLI(t testing.TB, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	return c.CLIAs(t, nil, folder, data, args...)
}

// CLIAs is like CLI, but runs the program as another user of the machine; nil means the user of the test.
func (c *Cluster) CLIAs(t testing.TB, user *syscall.Credential, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := c.command(t, folder, data, args...)
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

// command returns a command of the spool program as a client of gateway 0. folder is its working directory, data the
// folder for spool's own files.
func (c *Cluster) command(t testing.TB, folder, data string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := buildCLI()
	must(t, err)
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
		must(t, err)
		t.Cleanup(func() { check(t, os.RemoveAll(*dir)) })
		must(t, os.Chown(*dir, id, id))
	}
	return &syscall.Credential{Uid: id, Gid: id}, folder, data
}
