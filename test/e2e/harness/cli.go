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

// buildCLI builds the command line once for all tests of a process.
var buildCLI = sync.OnceValues(func() (string, error) {
	return build("github.com/spoolhq/spool/cmd/spool", "spool")
})

// CLI runs spool against gateway 0 in a folder, without a terminal, and returns
// its exit code and what it printed. data is the folder of what it keeps itself.
func (c *Cluster) CLI(t testing.TB, folder, data string, args ...string) (code int, out, says string) {
	t.Helper()
	return c.CLIAs(t, nil, folder, data, args...)
}

// CLIAs is CLI as another user; nil for the test's own.
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

// command returns spool's command line with gateway 0 as its server.
func (c *Cluster) command(t testing.TB, folder, data string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := buildCLI()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Dir, cmd.Env = folder, append(os.Environ(), "SPOOL_URL="+c.URL(0), "SPOOL_DATA_DIR="+data, "PWD="+folder)
	return cmd
}

// Nobody returns a user without rights on files of root's, who must run the test, and
// two folders of that user's: one to work in, one for what spool keeps.
func Nobody(t testing.TB) (user *syscall.Credential, folder, data string) {
	t.Helper()
	const id = 65534
	if os.Geteuid() != 0 {
		t.Skip("only root can run a program as another user")
	}
	for _, dir := range []*string{&folder, &data} {
		var err error
		*dir, err = os.MkdirTemp("", strings.ReplaceAll(t.Name(), "/", "_")) //nolint:usetesting // t.TempDir lies in a folder of root's
		must(t, err)
		t.Cleanup(func() { check(t, os.RemoveAll(*dir)) })
		must(t, os.Chown(*dir, id, id))
	}
	return &syscall.Credential{Uid: id, Gid: id}, folder, data
}
