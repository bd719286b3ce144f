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

// buildCLI builds the command line tool once for all tests of a process.
var buildCLI = sync.OnceValues(func() (string, error) {
	return build("github.com/spoolhq/spool/cmd/spool", "spool")
})

// CLI runs spool with gateway 0 in a folder, without a terminal, and returns its exit code and its output. data is
// the folder of spool's own files.
func (c *Cluster) CLI(t testing.TB, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	return c.CLIAs(t, nil, folder, data, args...)
}

// CLIAs is like CLI with another user; nil means the user of the test.
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

// command returns a command of spool that uses gateway 0.
func (c *Cluster) command(t testing.TB, folder, data string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := buildCLI()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Dir, cmd.Env = folder, append(os.Environ(), "SPOOL_URL="+c.URL(0), "SPOOL_DATA_DIR="+data, "PWD="+folder)
	return cmd
}

// UnprivilegedUser returns a user without rights on root's files, and two folders of that user: one to work in, and one for
// spool's own files. The test must run as root.
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
