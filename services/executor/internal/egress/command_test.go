package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// TestCommand tests that the program serves, reports that it is healthy, connects a stream to its admin socket, and
// ends on SIGTERM.
func TestCommand(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "egr") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "egress")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../../cmd/egress").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	env := append(os.Environ(), "SPOOL_EGRESS_LISTEN_SANDBOXES="+dir+"/s/e.sock", "SPOOL_EGRESS_LISTEN_ADMIN="+dir+"/a/e.sock", "SPOOL_EGRESS_DATA="+dir+"/d",
		"SPOOL_LOG_LEVEL=warn", "ANTHROPIC_API_KEY="+anthropicKey)
	command := func(ctx context.Context, args ...string) *exec.Cmd {
		c := exec.CommandContext(ctx, binary, args...)
		c.Env = env
		return c
	}
	if out, err := command(t.Context(), "health").CombinedOutput(); err == nil || !strings.HasPrefix(string(out), "egress: ") {
		t.Errorf("health of nobody: %v, %s", err, out)
	}
	log := new(safeBuffer)
	serve := command(t.Context())
	serve.Stderr = log
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- serve.Wait() }()
	poll(t, "health", func() bool { return command(t.Context(), "health").Run() == nil })

	// An executor reaches a remote engine's proxy by `egress dial`.
	client := api.NewClient(func(ctx context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		c := command(context.WithoutCancel(ctx), "dial")
		c.Stdin, c.Stdout = there, there
		if err := c.Start(); err != nil {
			return nil, err
		}
		go func() {
			_ = c.Wait()
			there.Close()
		}()
		return here, nil
	})
	id := mint(t, events.KindSandbox)
	if s, err := client.Register(t.Context(), id, api.Registration{Token: "a-token-of-some-length", Epoch: 3}); err != nil || s.Epoch != 3 {
		t.Errorf("%+v, %v", s, err)
	}
	client.Close()

	c, err := net.Dial("unix", dir+"/s/e.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within))
	_, _ = io.WriteString(c, "SPOOL/1 a-token-of-some-length\nGET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != http.StatusForbidden {
		t.Errorf("%v, %v", res, err)
	}
	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-exited:
		if err != nil {
			t.Errorf("SIGTERM: %v\n%s", err, log)
		}
	case <-time.After(within):
		_ = serve.Process.Kill()
		t.Fatalf("it does not end\n%s", log)
	}
	if s := log.String(); strings.Contains(s, `"level":"INFO"`) || !strings.Contains(s, `"msg":"egress denied"`) || !strings.Contains(s, `"host":"evil.example"`) || strings.Contains(s, anthropicKey) {
		t.Errorf("log: %s", s)
	}
}

func TestCommand_RefusesWrongUsage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		code int
		out  string
		err  string
	}{
		{[]string{"--help"}, 0, "SPOOL_EGRESS_LISTEN_ADMIN", ""},
		{[]string{"--nonsense"}, 2, "", "nonsense"},
		{[]string{"--connections", "many"}, 2, "", "connections"},
		{[]string{"health", "--listen-admin", filepath.Join(t.TempDir(), "none.sock")}, 1, "", "none.sock"},
		{[]string{"dial", "--listen-admin", filepath.Join(t.TempDir(), "none.sock")}, 1, "", "none.sock"},
		{[]string{"--idle", "1ns"}, 1, "", "idle"},
	} {
		var out, stderr bytes.Buffer
		code := egress.RunCommandLine(c.args, strings.NewReader(""), &out, &stderr)
		if code != c.code || !strings.Contains(out.String(), c.out) || !strings.Contains(stderr.String(), c.err) {
			t.Errorf("%v: %d\n%s\n%s", c.args, code, out.String(), stderr.String())
		}
	}
}
