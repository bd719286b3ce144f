package cli_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/events"
)

func TestServeForwardsToTheEgressProxy(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "eg") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	proxy, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/p", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	s := serveWith(t, []string{"SPOOL_RUNNER_EGRESS_TOKEN=tok_secret", "SPOOL_RUNNER_EGRESS_SOCKET=" + dir + "/p"}, "--egress-address", "127.0.0.1:0")
	_, rest, found := strings.Cut(s.log.String(), `msg="forwarding to the egress proxy" address=`)
	address, _, _ := strings.Cut(rest, " ")
	if !found {
		t.Fatalf("no address in the log:\n%s", s.log)
	}
	client, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	if err := proxy.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	upstream, err := proxy.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = upstream.Close() })
	if line, err := bufio.NewReader(upstream).ReadString('\n'); err != nil || line != "SPOOL/1 tok_secret\n" {
		t.Errorf("preamble %q, %v", line, err)
	}

	// The agent and its programs do not see the token.
	c := s.attach(1, 0)
	if got := find[events.BlockStart](t, c.run("exe_1", "shell env")).Block.Content; !strings.Contains(got, "PATH=") || strings.Contains(got, "SPOOL_RUNNER_") {
		t.Errorf("the agent's environment: %s", got)
	}
	if os.Geteuid() != 0 { // root may read every process
		if got := find[events.BlockStart](t, c.run("exe_2", fmt.Sprintf("shell cat /proc/%d/environ", s.cmd.Process.Pid))).Block.Content; strings.Contains(got, "tok_secret") {
			t.Error("the agent can read the token")
		}
	}
	// /proc/PID/environ belongs to root if the process cannot be dumped, which keeps processes of the same user out.
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/environ", s.cmd.Process.Pid), &st); err != nil || st.Uid != 0 {
		t.Errorf("owner %d of the runner's environ, %v", st.Uid, err)
	}
}

func TestServe_WithoutAnEgressProxyNothingListens(t *testing.T) {
	t.Parallel()
	s := serveWith(t, []string{"SPOOL_RUNNER_EGRESS_TOKEN=tok_secret"})
	if !strings.Contains(s.log.String(), "nothing is forwarded") || strings.Contains(s.log.String(), "forwarding") || strings.Contains(s.log.String(), "tok_secret") {
		t.Errorf("log:\n%s", s.log)
	}
	dir := t.TempDir()
	if r := runCommand(t, "", "serve", "--socket", dir+"/s", "--workspace", dir, "--state", t.TempDir(), "--egress-socket", "/p"); r.code != 1 || !strings.Contains(r.err, "SPOOL_RUNNER_EGRESS_TOKEN") {
		t.Errorf("a socket without a token: %+v", r)
	}
	if r := runCommand(t, "", "serve", "--socket", dir+"/s", "--workspace", dir, "--state", t.TempDir(), "--egress-server", "proxy.example.com:7443"); r.code != 1 || !strings.Contains(r.err, "SPOOL_RUNNER_EGRESS_TOKEN") {
		t.Errorf("a server without a token: %+v", r)
	}
}
