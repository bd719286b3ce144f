package cli_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/mcpsidecar"
)

// shell is an entrypoint whose first argument is a script.
const shell = `["sh","-c"]`

// mcpServe serves until the test ends, or end is called. It returns the socket.
func mcpServe(t *testing.T, flags ...string) (socket string, end func() error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "mcp") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	cmd := command(append([]string{"mcp-serve", "--socket", socket}, flags...)...)
	cmd.Env, cmd.Stderr = append(cmd.Env, "OF_IMAGE=yes", "SPOOL_RUNNER_SECRET=no"), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Once, because a second signal would kill the process during its shutdown.
	end = sync.OnceValue(func() error { return cmd.Process.Signal(syscall.SIGTERM) })
	t.Cleanup(func() {
		if err := errors.Join(end(), cmd.Wait()); err != nil {
			t.Errorf("mcp-serve: %v", err)
		}
	})
	if r := runCommand(t, "", "mcp-ready", "--socket", socket, "--within", patience.String()); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	return socket, end
}

// connection is a running mcp-join.
type connection struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func connect(t *testing.T, socket string, args ...string) *connection {
	t.Helper()
	c := &connection{cmd: command(append([]string{"mcp-join", "--socket", socket, "--"}, args...)...)}
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		c.in, err = c.cmd.StdinPipe()
	}
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill() // most have ended
		_ = c.cmd.Wait()
	})
	return c
}

func (c *connection) line(t *testing.T) string {
	t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(s, "\n")
}

// The arguments and variables of a connection reach its program; streams and exit code are returned.
func TestMCPJoin(t *testing.T) {
	t.Parallel()
	socket, _ := mcpServe(t, "--entrypoint", shell, "--cmd", `["echo by itself; cat"]`)
	join := func(stdin string, env map[string]string, args ...string) result {
		t.Helper()
		words := []string{"mcp-join", "--socket", socket}
		for k := range env {
			words = append(words, "--env", k)
		}
		cmd := command(append(append(words, "--"), args...)...)
		for k, v := range env {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		var out, errs strings.Builder
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
		if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
	}
	if r := join("in", map[string]string{"A": "a, b=${c}", "EMPTY": ""}, `echo "$A|${EMPTY-unset}|$OF_IMAGE|$SPOOL_RUNNER_SECRET|$0"; cat; echo aside >&2; exit 7`, "--"); r != (result{"a, b=${c}||yes||--\nin", "aside\n", 7}) {
		t.Errorf("%+v", r)
	}
	if r := join("more", nil); r != (result{"by itself\nmore", "", 0}) {
		t.Errorf("without arguments: %+v", r)
	}
	big := strings.Repeat("0123456789abcdef", 1<<16)
	if r := join(big, nil, "cat"); r.out != big || r.code != 0 {
		t.Errorf("of %d bytes %d came back, code %d %s", len(big), len(r.out), r.code, r.err)
	}
	if r := join("", nil, "kill -9 $$"); r.code != 128+9 {
		t.Errorf("killed: %+v", r)
	}
	// Processes that it leaves behind do not delay the end.
	if r := join("", nil, "sleep 1000 & echo on"); r != (result{"on\n", "", 0}) {
		t.Errorf("with a child: %+v", r)
	}
}

// A program ends with its connection, with all its descendants, and leaves no files.
func TestMCPConnectionEnds(t *testing.T) {
	t.Parallel()
	scratch := t.TempDir()
	socket, stop := mcpServe(t, "--entrypoint", shell, "--scratch", scratch+",/no/such/folder")
	file := filepath.Join(scratch, "left", "x")
	const child = `mkdir -p "${0%/*}"; echo 1 >"$0"; trap '' TERM HUP; (trap '' TERM; sleep 1000) & echo $!; setsid sleep 1001 & echo $!; echo $$; cat >/dev/null; sleep 1000`
	for how, end := range map[string]func(*connection) error{
		"killed":      func(c *connection) error { return c.cmd.Process.Kill() },
		"asked":       func(c *connection) error { return c.cmd.Process.Signal(syscall.SIGTERM) },
		"out of work": func(c *connection) error { return c.in.Close() },
	} {
		c := connect(t, socket, child, file)
		var pids []int
		for range 3 {
			pid, err := strconv.Atoi(c.line(t))
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
		if _, err := os.Stat(file); err != nil {
			t.Fatal(err)
		}
		if err := end(c); err != nil {
			t.Fatal(err)
		}
		for _, pid := range pids {
			eventually(t, fmt.Sprintf("%s: process %d is gone", how, pid), func() bool { return !runs(pid) })
		}
		eventually(t, how+": its files are gone", func() bool {
			list, err := os.ReadDir(scratch)
			return err == nil && len(list) == 0
		})
	}
	// It also ends with the container.
	c := connect(t, socket, `trap '' TERM; echo $$; cat`)
	pid, err := strconv.Atoi(c.line(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the program is gone", func() bool { return !runs(pid) })
	if err := c.cmd.Wait(); err == nil || c.cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("the agent's side ended with %v", err)
	}
}

// The number of connections is limited, and a connection that ends makes room.
func TestMCPConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	socket, _ := mcpServe(t, "--entrypoint", shell)
	var all []*connection
	for range mcpsidecar.DefaultMaxConnections {
		c := connect(t, socket, "echo on; cat")
		c.line(t)
		all = append(all, c)
	}
	if r := runCommand(t, "", "mcp-join", "--socket", socket, "--", "echo on"); r.code != 1 || !strings.Contains(r.err, "16 connections are open already") {
		t.Errorf("one more: %+v", r)
	}
	if err := all[0].in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := all[0].cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if r := runCommand(t, "", "mcp-join", "--socket", socket, "--", "echo on"); r.code != 0 || r.out != "on\n" {
		t.Errorf("after one has ended: %+v", r)
	}
}

func TestMCPErrors_HaveExitCodes(t *testing.T) {
	t.Parallel()
	none, _ := mcpServe(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no container":       {[]string{"mcp-join", "--socket", dir + "/none", "--within", "10ms", "--"}, 1, "the MCP server's container does not answer"},
		"never ready":        {[]string{"mcp-ready", "--socket", dir + "/none", "--within", "10ms"}, 1, "not ready within 10ms"},
		"no program":         {[]string{"mcp-join", "--socket", none, "--"}, 127, "image has no entrypoint"},
		"missing program":    {[]string{"mcp-join", "--socket", none, "--", "/no/such"}, 127, "/no/such"},
		"missing entrypoint": {[]string{"mcp-serve", "--socket", dir + "/s", "--entrypoint", `["/no/such"]`}, 1, "the image's entrypoint"},
		"entrypoint":         {[]string{"mcp-serve", "--socket", dir + "/s", "--entrypoint", `sh`}, 2, "entrypoint"},
		"token":              {[]string{"mcp-serve", "--socket", dir + "/s", "--egress-socket", dir + "/e"}, 1, "SPOOL_RUNNER_EGRESS_TOKEN"},
	} {
		if r := runCommand(t, "", c.args...); r.code != c.code || !strings.Contains(r.err, c.want) {
			t.Errorf("%s: %+v, want code %d and %q", name, r, c.code, c.want)
		}
	}
	// A connection that sends nothing, or an invalid line, changes nothing.
	if err := mcpsidecar.AwaitReady(context.Background(), none, patience); err != nil {
		t.Error(err)
	}
}
