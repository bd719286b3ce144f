package docker

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// shell is an entrypoint whose arguments are a script and the script's arguments.
const shell = `ENTRYPOINT ["sh","-c"]`

// imageWith builds an image from the tests' image with further lines of a Dockerfile.
func imageWith(t *testing.T, p *Provider, changes ...string) string {
	t.Helper()
	name := "spool-test/" + strings.ToLower(newID(t, "sbx")[4:])
	made, err := p.api.ContainerCreate(t.Context(), &container.Config{Image: testImage, Entrypoint: []string{"none"}}, nil, nil, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.api.ContainerCommit(t.Context(), made.ID, container.CommitOptions{Reference: name, Changes: changes})
	if err := errors.Join(err, p.removeContainer(t.Context(), made.ID)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := p.api.ImageRemove(context.Background(), name, image.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	return name
}

// withServers creates a sandbox for n MCP servers.
func withServers(t *testing.T, p *Provider, n int) *box {
	t.Helper()
	spec := newSpec(t)
	spec.Servers = n
	return create(t, p, spec)
}

func serve(t *testing.T, p *Provider, b *box, n int, s sandbox.MCPServer) string {
	t.Helper()
	socket, err := p.StartServer(t.Context(), b.id, n, s)
	if err != nil {
		t.Fatal(err)
	}
	return socket
}

// joined starts a server's program, as an agent in the sandbox does.
func joined(t *testing.T, b *box, socket string, env map[string]string, args ...string) sandbox.Process {
	t.Helper()
	words := []string{"runner", "mcp-join", "--socket", socket}
	for k := range env {
		words = append(words, "--env", k)
	}
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: append(append(words, "--"), args...), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proc.Kill() }) // most have ended
	return proc
}

// runServer connects to the MCP server behind a socket, which starts its program, and returns what the program printed
// and its exit code.
func runServer(t *testing.T, b *box, socket string, env map[string]string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	proc := joined(t, b, socket, env, args...)
	if err := proc.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(proc.Stdout())
	errs, err2 := io.ReadAll(proc.Stderr())
	code, err3 := proc.Wait()
	if err := errors.Join(err, err2, err3); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)), strings.TrimSpace(string(errs)), code
}

// serverContainers returns the containers of a sandbox's servers.
func serverContainers(t *testing.T, p *Provider, id string) []string {
	t.Helper()
	list, err := p.listServers(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, c := range list {
		ids = append(ids, c.ID)
	}
	return ids
}

// sockets returns the volumes of a sandbox's servers.
func sockets(t *testing.T, p *Provider, id string) (names []string) {
	t.Helper()
	list, err := p.api.VolumeList(t.Context(), volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", labelSandbox+"="+id), filters.Arg("label", labelRole+"="+roleSocket))})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range list.Volumes {
		names = append(names, v.Name)
	}
	return names
}

// A server's program sees a container with the expected restrictions.
func TestServerHardening(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.TmpBytes = 32 << 20
	p := provide(t, cfg)
	b := withServers(t, p, 2)
	image := imageWith(t, p, shell, "WORKDIR /usr", "VOLUME /data", "ENV OF_IMAGE=yes")
	socket := serve(t, p, b, 0, sandbox.MCPServer{Image: image})
	serve(t, p, b, 1, sandbox.MCPServer{Image: image})
	for name, tc := range map[string]struct{ line, want string }{
		"user":          {`test "$(id -u)" -ge 70000 && test "$(id -G)" = "$(id -u)" && id -un`, "agent"},
		"interfaces":    {`ls /sys/class/net`, "lo"},
		"routes":        {`tail -n +2 /proc/net/route | wc -l`, "0"},
		"capabilities":  {`grep -E '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | grep -vc 0000000000000000`, "0"},
		"no new rights": {`grep NoNewPrivs /proc/self/status`, "NoNewPrivs:\t1"},
		"seccomp":       {`grep '^Seccomp:' /proc/self/status`, "Seccomp:\t2"},
		"root":          {`touch /x /etc/x /usr/x /var/tmp/x /spool/x /spool/bin/x 2>&1 | grep -vc 'Read-only file system'`, "0"},
		"what it may write": {`for d in /tmp /home/spool /data /dev/shm; do touch $d/x && rm $d/x && stat -f -c %T $d; done`,
			"tmpfs\ntmpfs\ntmpfs\ntmpfs"},
		"size":             {`df -B1 --output=size /tmp | tail -1`, "33554432"},
		"the sandbox's":    {`ls -d /workspace /spool/state /run/spool/egress /bin/skills 2>/dev/null | wc -l`, "0"},
		"other servers":    {`ls /spool/mcp | grep -c '\.sock$'`, "1"},
		"work folder":      {`pwd; echo $HOME $OF_IMAGE`, "/usr\n/home/spool yes"},
		"the runner's own": {`env | grep -c SPOOL_`, "0"},
		"sockets' room":    {`head -c 2000000 /dev/zero >/spool/mcp/big 2>/dev/null; stat -c %s /spool/mcp/big; rm /spool/mcp/big`, "1048576"},
		"processes":        {`cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2>/dev/null`, "512"},
	} {
		if out, errs, _ := runServer(t, b, socket, nil, tc.line); out != tc.want {
			t.Errorf("%s: %q, want %q (%s)", name, out, tc.want, errs)
		}
	}
	users := map[string]bool{}
	box, _, _ := sh(t, b, "id -u")
	users[box] = true
	for n := range 2 {
		user, _, _ := runServer(t, b, serve(t, p, b, n, sandbox.MCPServer{Image: image}), nil, "id -u")
		users[user] = true
	}
	if len(users) != 3 {
		t.Errorf("the sandbox and its two servers share users: %v", users)
	}
	if out, _, code := sh(t, b, `touch /spool/mcp/0/x /spool/mcp/1/x 2>&1 | grep -c 'Read-only'; ls /spool/mcp/0 | grep -c sock`); out != "2\n1" || code != 0 {
		t.Errorf("the sandbox may write where sockets are: %q", out)
	}
	// The account is that of the image's user, with a number that the image does not choose.
	for user, want := range map[string]string{"games:games": "games\n/usr/games", "4242": "agent\n/home/spool", "no-such-user": "agent\n/home/spool"} {
		socket := serve(t, p, b, 1, sandbox.MCPServer{Image: imageWith(t, p, shell, "USER "+user)})
		if out, _, _ := runServer(t, b, socket, nil, "id -un; echo $HOME"); out != want {
			t.Errorf("user %s of an image: %q, want %q", user, out, want)
		}
	}
}

// The variables and arguments of a connection reach only its program; its streams and its exit code are returned.
func TestServerConnections(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	b := withServers(t, p, 1)
	s := sandbox.MCPServer{Image: imageWith(t, p, shell, `CMD ["echo by itself; cat"]`)}
	socket := serve(t, p, b, 0, s)
	const secret = "nobody-may-see-4711"
	out, errs, code := runServer(t, b, socket, map[string]string{"TOKEN": secret}, `echo $TOKEN $0; echo aside >&2; exit 7`, "--first")
	if out != secret+" --first" || errs != "aside" || code != 7 {
		t.Errorf("said %q and %q, code %d", out, errs, code)
	}
	if out, _, code := runServer(t, b, socket, nil); out != "by itself" || code != 0 {
		t.Errorf("without arguments: %q, code %d", out, code)
	}
	// Two concurrent connections have separate processes, each of which ends with its connection and leaves nothing.
	one, two := joined(t, b, socket, map[string]string{"TOKEN": secret}, `echo $TOKEN >/tmp/left; sleep 1000 & echo on; cat`), joined(t, b, socket, nil, `cat`)
	if line, err := bufio.NewReader(one.Stdout()).ReadString('\n'); line != "on\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	back := bufio.NewReader(two.Stdout())
	for _, text := range []string{"a\n", "b\n"} {
		if _, err := io.WriteString(two.Stdin(), text); err != nil {
			t.Fatal(err)
		}
		if got, err := back.ReadString('\n'); got != text || err != nil {
			t.Errorf("echo %q, %v", got, err)
		}
	}
	list := serverContainers(t, p, b.id)
	inspected, err := p.api.ContainerInspect(t.Context(), list[0])
	if err != nil || strings.Contains(strings.Join(inspected.Config.Env, " ")+strings.Join(inspected.Config.Cmd, " ")+strings.Join(inspected.Config.Entrypoint, " "), secret) {
		t.Errorf("inspect shows the secret, or %v", err)
	}
	if err := errors.Join(one.Stdin().Close(), two.Stdin().Close()); err != nil {
		t.Fatal(err)
	}
	for _, proc := range []sandbox.Process{one, two} {
		if _, err := proc.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if out, _, _ := runServer(t, b, socket, nil, `ls -A /tmp; cat /proc/[0-9]*/cmdline | tr '\0' '\n' | grep -c ^sleep`); out != "0" {
		t.Errorf("left behind: %q", out)
	}
	// The next executor finds the same container; another definition leads to another container.
	next := provide(t, p.cfg)
	if at := serve(t, next, b, 0, s); at != socket || !slices.Equal(serverContainers(t, p, b.id), list) {
		t.Errorf("another container: %q at %s, before %q at %s", serverContainers(t, p, b.id), at, list, socket)
	}
	at := serve(t, next, b, 0, sandbox.MCPServer{Image: s.Image, Egress: true})
	if again := serverContainers(t, p, b.id); len(again) != 1 || again[0] == list[0] || at == socket {
		t.Errorf("the same container %q at %s for something else", again, at)
	}
	killContainer(t, p, serverContainers(t, p, b.id)[0])
	if out, _, _ := runServer(t, b, serve(t, p, b, 0, s), nil); out != "by itself" {
		t.Errorf("after its end: %q", out)
	}
	if out, _, _ := sh(t, b, `ls /spool/mcp/0 | wc -l`); out != "1" {
		t.Errorf("sockets: %s", out)
	}
}

func killContainer(t *testing.T, p *Provider, id string) {
	t.Helper()
	if err := p.api.ContainerKill(t.Context(), id, "KILL"); err != nil {
		t.Fatal(err)
	}
}

// A call continues after the provider that began it is gone and another one manages the server.
func TestServerOutlivesItsProvider(t *testing.T) {
	t.Parallel()
	first := provide(t, needEngine(t))
	b := withServers(t, first, 1)
	s := sandbox.MCPServer{Image: imageWith(t, first, shell)}
	// The caller is a process of the sandbox, like an agent, and depends on no executor.
	if out, errs, code := sh(t, b, `mkfifo in; (runner=/spool/bin/runner; exec setsid $runner mcp-join --socket `+serve(t, first, b, 0, s)+` -- 'echo began; cat; echo over' <in >out 2>&1) & exec 3>in; sleep 1000 >&3 2>/dev/null </dev/null & echo $! >holder`); code != 0 {
		t.Fatalf("%q %q", out, errs)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := provide(t, first.cfg)
	found, err := second.Attach(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.StartServer(t.Context(), b.id, 0, s); err != nil {
		t.Fatal(err)
	}
	out, errs, _ := sh(t, found, `while ! grep -q began out; do :; done; echo more >in; while ! grep -q more out; do :; done; kill $(cat holder); while ! grep -q over out; do :; done; cat out`)
	if out != "began\nmore\nover" {
		t.Errorf("%q (%s)", out, errs)
	}
}

// The servers and their volumes end with the sandbox. The sweep removes servers whose sandbox is gone.
func TestServers_EndWithTheirSandbox(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Engine += "-servers"
	p := provide(t, cfg)
	image := imageWith(t, p, shell)
	spec := newSpec(t)
	spec.Labels.Engine, spec.Servers = cfg.Engine, 2
	kept, stray := create(t, p, spec), (*box)(nil)
	spec.ID = newID(t, "sbx")
	stray = create(t, p, spec)
	for _, b := range []*box{kept, stray} {
		serve(t, p, b, 0, sandbox.MCPServer{Image: image})
		serve(t, p, b, 1, sandbox.MCPServer{Image: image})
	}
	if err := p.removeContainer(t.Context(), stray.container); err != nil { // an executor did this and died
		t.Fatal(err)
	}
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if left, room := serverContainers(t, p, stray.id), sockets(t, p, stray.id); len(left)+len(room) != 0 {
		t.Errorf("the sweep leaves %q and %q", left, room)
	}
	if left, room := serverContainers(t, p, kept.id), sockets(t, p, kept.id); len(left) != 2 || len(room) != 2 {
		t.Errorf("the sweep leaves %q and %q of a sandbox that lives", left, room)
	}
	if err := p.Terminate(t.Context(), kept.id, false); err != nil {
		t.Fatal(err)
	}
	if left, room := serverContainers(t, p, kept.id), sockets(t, p, kept.id); len(left)+len(room) != 0 {
		t.Errorf("terminate leaves %q and %q", left, room)
	}
}

// Servers are paused and resumed with their sandbox.
func TestServers_PauseWithTheirSandbox(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	b := withServers(t, p, 1)
	s := sandbox.MCPServer{Image: imageWith(t, p, shell)}
	socket := serve(t, p, b, 0, s)
	state := func() container.ContainerState {
		got, err := p.api.ContainerInspect(t.Context(), serverContainers(t, p, b.id)[0])
		if err != nil {
			t.Fatal(err)
		}
		return got.State.Status
	}
	if err := p.Pause(t.Context(), b.id); err != nil || state() != container.StatePaused {
		t.Errorf("paused: %v, %s", err, state())
	}
	if err := p.Resume(t.Context(), b.id); err != nil || state() != container.StateRunning {
		t.Errorf("resumed: %v, %s", err, state())
	}
	if out, _, _ := runServer(t, b, socket, nil, "echo here"); out != "here" {
		t.Errorf("after a pause: %q", out)
	}
}

// A server that cannot be started is refused with a message.
func TestServersThatFail(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	b := withServers(t, p, 1)
	for image, want := range map[string]struct{ code, words string }{
		"spool-test/no-such-image:1":                       {sandbox.CodeImageNotFound, "spool-test/no-such-image:1"},
		imageWith(t, p, `ENTRYPOINT ["/no/such/program"]`): {sandbox.CodeMCPServerFailed, "/no/such/program"},
		"sha256:" + strings.Repeat("0123456789abcdef", 4):  {sandbox.CodeImageNotFound, "0123456789abcdef"},
	} {
		_, err := p.StartServer(t.Context(), b.id, 0, sandbox.MCPServer{Image: image})
		var typed *sandbox.Error
		if !errors.As(err, &typed) || typed.Code != want.code || !strings.Contains(err.Error(), want.words) {
			t.Errorf("%s: %v, want %s with %q", image, err, want.code, want.words)
		}
	}
	if left := serverContainers(t, p, b.id); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if _, err := p.StartServer(t.Context(), b.id, 1, sandbox.MCPServer{Image: testImage}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("one more than there is room for: %v", err)
	}
	if _, err := p.StartServer(t.Context(), newID(t, "sbx"), 0, sandbox.MCPServer{Image: testImage}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no sandbox: %v", err)
	}
	spec := newSpec(t)
	if spec.Servers = -1; p.checkSpec(spec) == nil {
		t.Error("a negative number of servers is taken")
	}
}

// A server uses the sandbox's egress token, and reaches only hosts of the allowlist.
func TestServerEgress(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	dir, err := os.MkdirTemp("", "eg") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	proxy, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "egress.sock"), Net: "unix"})
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, "egress.sock"), 0o666)) //nolint:gosec // sandboxes have another user
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	cfg.EgressSockets = dir
	p := provide(t, cfg)
	spec := newSpec(t)
	spec.Servers, spec.EgressToken = 2, "tok_secret"
	b := create(t, p, spec)
	image := imageWith(t, p, `ENTRYPOINT ["bash","-c"]`)
	if out, _, _ := runServer(t, b, serve(t, p, b, 0, sandbox.MCPServer{Image: image}), nil, `echo "$HTTPS_PROXY"; ls /run/spool/egress 2>/dev/null; (exec 3<>/dev/tcp/127.0.0.1/7070) 2>/dev/null || echo closed`); out != "closed" {
		t.Errorf("without entries: %q", out)
	}
	answered := make(chan string, 1)
	go func() {
		if proxy.SetDeadline(time.Now().Add(time.Minute)) != nil {
			return
		}
		c, err := proxy.Accept()
		if err != nil {
			answered <- err.Error()
			return
		}
		defer c.Close() //nolint:errcheck // the answer was read
		in := bufio.NewReader(c)
		first, err := in.ReadString('\n')
		for line := first; err == nil && line != "\r\n"; { // all of the request: closed with some of it unread, the answer may be lost
			line, err = in.ReadString('\n')
		}
		if err == nil {
			_, err = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nthrough\n")
		}
		if err != nil {
			first = err.Error()
		}
		answered <- first
	}()
	out, errs, _ := runServer(t, b, serve(t, p, b, 1, sandbox.MCPServer{Image: image, Egress: true}), nil,
		`echo "$HTTPS_PROXY"; tr '\0' '\n' </proc/1/environ 2>/dev/null | grep -c tok_secret; exec 3<>/dev/tcp/127.0.0.1/7070; printf 'CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n' >&3; tail -n 1 <&3`)
	if out != "http://127.0.0.1:7070\n0\nthrough" {
		t.Errorf("with entries: %q (%s)", out, errs)
	}
	if first := <-answered; first != "SPOOL/1 tok_secret hosts\n" {
		t.Errorf("it says %q of itself", first)
	}
}
