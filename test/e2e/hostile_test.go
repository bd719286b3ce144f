package e2e

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestHostileAgent_IsContained runs an agent that attacks its sandbox in every way. It is contained, the log shows
// the attempts, and the session continues.
func TestHostileAgent_IsContained(t *testing.T) {
	c := newDockerCluster(t, harness.Options{Executor: executor.Config{
		SandboxMemory: 512 << 20, SandboxPIDs: 128, SandboxDisk: 64 << 20, SandboxTmp: 64 << 20, SandboxCPUs: 1,
	}})
	for name, test := range map[string]func(*testing.T, *hostile){
		"no key anywhere":    noKeyAnywhere,
		"no way out":         noEgress,
		"names and numbers":  namesAndNumbers,
		"other sandboxes":    otherSandboxes,
		"fork bomb":          forkBomb,
		"memory":             memoryFill,
		"disk":               diskFill,
		"symlinks":           symlinksOut,
		"the engine's place": noTraceOfTheEngine,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newHostile(t, c))
		})
	}
}

// hostile is a session whose agent runs the scripts of the test.
type hostile struct{ *talk }

func newHostile(t *testing.T, c *harness.Cluster) *hostile {
	return &hostile{newTalkWith(t, c, "spool", map[string]any{
		"model": "known-model", "sessionOptions": map[string]any{"egress": []string{"ok.example", "*.fine.example:8443"}},
	})}
}

// runs makes the agent run a shell script and returns its output.
func (h *hostile) runs(script string) (said string, x turn) {
	h.t.Helper()
	// The scripted model reads a message as a line of text, so the script is encoded as one word.
	word := base64.StdEncoding.EncodeToString([]byte(script))
	x = h.ask("run the command echo " + word + " | base64 -d | bash 2>&1")
	for _, r := range x.kind(events.KindToolResult) {
		said += r.Output
	}
	return said, x
}

// stillAnswers checks that the session answers after the attack.
func (h *hostile) stillAnswers() {
	h.t.Helper()
	h.mustComplete("are you still there?", "You said: are you still there?")
}

// checkEvent checks that at least one event of type P satisfies ok.
func checkEvent[P events.Payload](t *testing.T, x turn, what string, ok func(P) bool) {
	t.Helper()
	if all := of[P](x); !slices.ContainsFunc(all, ok) {
		t.Errorf("no event about %s: %+v", what, all)
	}
}

func noKeyAnywhere(t *testing.T, h *hostile) {
	said, _ := h.runs(`
env
for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/maps; do tr '\0' '\n' <"$f"; done 2>/dev/null
echo searched
grep -rslF "sk-the-real-key" / --exclude-dir=proc --exclude-dir=sys 2>/dev/null
echo over
id -un; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status
`)
	after, _ := h.runs(`cat /proc/1/environ; echo; ls -l /proc/1/fd; cat /proc/1/mem | head -c 10`)
	container := h.c.SandboxContainer(h.session)
	inspected := harness.RunDocker(t, "inspect", container)
	image := harness.RunDocker(t, "image", "inspect", harness.SandboxImage) + harness.RunDocker(t, "history", "--no-trunc", harness.SandboxImage)
	logged := text(t, h.s.Events)
	for what, s := range map[string]string{"processes and files": said + after, "docker inspect": inspected, "image": image, "the log": logged} {
		if strings.Contains(s, harness.ModelAPIKey) {
			t.Errorf("the key was found in %s", what)
		}
	}
	if !strings.Contains(said, "searched\nover\nagent\n") || !strings.Contains(said, "CapEff:\t0000000000000000") || !strings.Contains(said, "NoNewPrivs:\t1") {
		t.Errorf("inside it is\n%s", said)
	}
	if strings.Contains(said+after, "SPOOL_RUNNER_EGRESS_TOKEN") || !strings.Contains(after, "Permission denied") {
		t.Errorf("the runner's own environment is open: %s", after)
	}
	// This is a positive control: the search finds the text where it is.
	found, _ := h.runs(`export PLANTED=sk-the-real-key-planted; env | grep PLANTED; echo sk-the-real-key-in-a-file >/workspace/planted; grep -rlF sk-the-real-key /workspace`)
	if !strings.Contains(found, "sk-the-real-key-planted") || !strings.Contains(found, "/workspace/planted") {
		t.Errorf("the planted text was not found: %s", found)
	}
}

// noEgress checks that the sandbox reaches only the proxy, and through the proxy only allowed hosts.
func noEgress(t *testing.T, h *hostile) {
	nats, err := url.Parse(h.c.Servers.NATSURL)
	if err != nil {
		t.Fatal(err)
	}
	pg, err := url.Parse(h.c.Servers.DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	said, x := h.runs(fmt.Sprintf(`
cat /proc/net/dev | tail -n +3 | cut -d: -f1 | xargs
for target in 172.17.0.1:22 %s %s 8.8.8.8:53 169.254.169.254:80; do
  timeout 2 bash -c "echo >/dev/tcp/${target/:/\/}" 2>/dev/null && echo "direct $target is open"
done
getent hosts example.com || echo no resolver
for u in http://169.254.169.254/latest/meta-data/ http://%s/ http://%s/ http://172.17.0.1:2375/ http://evil.example/ https://evil.example/; do
  curl -sS -m 5 --noproxy '' -o /dev/null -w "$u %%{http_code} %%{http_connect}\n" "$u" 2>/dev/null
done
`, nats.Host, pg.Host, nats.Host, pg.Host))
	if !strings.Contains(said, "lo\n") || strings.Contains(said, "eth0") || strings.Contains(said, "is open") || !strings.Contains(said, "no resolver") {
		t.Errorf("the network is\n%s", said)
	}
	for _, ok := range []string{" 200 ", " 204 ", " 301 ", " 400 "} {
		if strings.Contains(said, ok) {
			t.Errorf("a request was let through:\n%s", said)
		}
	}
	for _, host := range []string{"169.254.169.254", "evil.example", nats.Hostname(), "172.17.0.1"} {
		checkEvent(t, x, "a connection to "+host, func(d events.EgressDenied) bool { return d.Host == host })
	}
	h.stillAnswers()
}

// namesAndNumbers requests addresses that are not allowed in all notations, and names that resemble an allowed one.
func namesAndNumbers(t *testing.T, h *hostile) {
	targets := []string{
		"169.254.169.254", "[::ffff:169.254.169.254]", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "localhost",
		"ok.example.evil", "evil-ok.example", "fine.example", "a.fine.example", "ok.example@evil.example",
	}
	var script strings.Builder
	for _, target := range targets {
		fmt.Fprintf(&script, "curl -sS -m 5 --noproxy '' -o /dev/null -w '%%{http_code}\\n' 'http://%s:80/'\n", target)
	}
	// The script also sends requests that curl would not send: a name with NUL, and a malformed request line.
	script.WriteString(`python3 - <<'PY'
import socket
def ask(raw):
    s = socket.create_connection(("127.0.0.1", 7070), 5); s.settimeout(5); s.sendall(raw)
    try: return s.recv(200).split(b"\r\n")[0].decode()
    except Exception as e: return repr(e)
for raw in (b"CONNECT ok.example\0evil.example:443 HTTP/1.1\r\nHost: ok.example\r\n\r\n", b"GET http://evil.example/ HTTP/1.1\r\nHost: ok.example\r\n\r\n",
            b"GET /v1/sandboxes HTTP/1.1\r\nHost: egress\r\n\r\n", b"GET /anthropic/../admin HTTP/1.1\r\nHost: x\r\n\r\n"):
    print("raw", ask(raw))
PY
`)
	said, x := h.runs(script.String())
	if strings.Contains(said, "200\n") || strings.Contains(said, "raw HTTP/1.1 200") {
		t.Errorf("a request was let through:\n%s", said)
	}
	if n := len(of[events.EgressDenied](x)); n < len(targets)-2 {
		t.Errorf("%d denials for %d attempts:\n%s", n, len(targets), said)
	}
	h.stillAnswers()
}

// otherSandboxes checks that other sandboxes cannot be reached, and that their identity cannot be used.
func otherSandboxes(t *testing.T, h *hostile) {
	said, _ := h.runs(`python3 - <<'PY'
import socket, os
path = [os.path.join(d, f) for d, _, fs in os.walk("/run/spool") for f in fs]
print("sockets", path)
for p in path:
    for hello in (b"SPOOL/1 guessed-token-0123456789\n", b"SPOOL/1 \n", b""):
        s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(p)
        s.sendall(hello + b"POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        try: print("answer", s.recv(100).split(b"\r\n")[0].decode())
        except Exception as e: print("answer", repr(e))
    try:
        os.unlink(p); print("unlinked", p)
    except OSError as e: print("kept", e.strerror)
PY
ls /proc | grep -c '^[0-9]'; ls -d /proc/[0-9]* | wc -l`)
	if strings.Contains(said, "HTTP/1.1 200") || strings.Contains(said, "unlinked") || !strings.Contains(said, "kept") || !strings.Contains(said, "HTTP/1.1 407") {
		t.Errorf("requests to the shared socket returned\n%s", said)
	}
	h.stillAnswers()
}

func forkBomb(t *testing.T, h *hostile) {
	said, x := h.runs(`
bomb() { bomb | bomb & }
( ulimit -c 0; bomb ) 2>/tmp/bomb.log
sleep 3; grep -ciE 'resource temporarily|retry|cannot fork' /tmp/bomb.log; pids=$(ls -d /proc/[0-9]* | wc -l); echo "there are $pids"; pkill -9 -f bomb; echo over`)
	if strings.Contains(said, "over") && !strings.Contains(said, "there are") {
		t.Errorf("after the fork bomb:\n%s", said)
	}
	if out := harness.RunDocker(t, "inspect", "-f", "{{.HostConfig.PidsLimit}}", h.c.SandboxContainer(h.session)); out != "128" {
		t.Errorf("the limit of processes is %s", out)
	}
	_ = x // The command may end either way: the machine and the session must continue to work.
	h.stillAnswers()
}

func memoryFill(t *testing.T, h *hostile) {
	said, _ := h.runs(`python3 -c '
x = []
while True: x.append(bytearray(32 << 20))
'; echo "ended with $?"`)
	if !strings.Contains(said, "ended with 137") && !strings.Contains(said, "MemoryError") {
		t.Errorf("the memory hog gave\n%s", said)
	}
	h.stillAnswers()
}

func diskFill(t *testing.T, h *hostile) {
	x := h.ask("run the command dd if=/dev/zero of=/workspace/big bs=1M count=4000 2>&1; sleep 30; echo survived")
	if end := ended[events.ExecutionFailed](x); end.Code != "DISK_LIMIT" {
		t.Errorf("ended with %+v", end)
	}
	checkEvent(t, x, "the full disk", func(e events.Error) bool { return e.Code == "DISK_LIMIT" })
	if again := h.ask("are you still there?"); len(of[events.ExecutionFailed](again)) != 1 {
		t.Errorf("a full workspace took another turn: %+v", again.end)
	}
	harness.Eventually(t, "the full workspace is in a snapshot", func() bool {
		res, err := http.Get(h.c.URL(0) + "/api/sessions/" + h.session + "/files/big")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close() //nolint:errcheck // the body is only read
		n, err := io.Copy(io.Discard, res.Body)
		return err == nil && res.StatusCode == http.StatusOK && n >= 60<<20
	})
	req, err := http.NewRequest(http.MethodDelete, h.c.URL(0)+"/api/sessions/"+h.session+"/files/big", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close() //nolint:errcheck // the body is not needed
	if res.StatusCode != http.StatusAccepted {
		t.Fatalf("delete answered %d", res.StatusCode)
	}
	h.stillAnswers()
	tmp, _ := h.runs(`dd if=/dev/zero of=/tmp/fill bs=1M count=4000 2>&1 | tail -1; dd if=/dev/zero of=/etc/x bs=1 count=1 2>&1; dd if=/dev/zero of=$HOME/fill bs=1M count=4000 2>&1 | grep -o 'No space left'; rm -f /tmp/fill $HOME/fill`)
	if !strings.Contains(tmp, "No space left") || !strings.Contains(tmp, "Read-only file system") {
		t.Errorf("outside of the workspace:\n%s", tmp)
	}
	h.stillAnswers()
}

func symlinksOut(t *testing.T, h *hostile) {
	h.runs(`cd /workspace; ln -s /etc/passwd link; ln -s / root; ln -s /spool/state state; ln /etc/hostname hard 2>&1; mkdir -p ../workspace-evil 2>&1; echo x >real; ls -la`)
	h.awaitFile("real", "x\n")
	for _, path := range []string{"link", "root/etc/passwd", "state/agent-sessions.json", "..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "..%2Fworkspace-evil%2Fx"} {
		res, err := http.Get(h.c.URL(0) + "/api/sessions/" + h.session + "/files/" + path)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close() //nolint:errcheck // the body is read
		if res.StatusCode < 400 || strings.Contains(string(raw), "root:") {
			t.Errorf("%s answered %d: %.200s", path, res.StatusCode, raw)
		}
	}
	h.stillAnswers()
}

// noTraceOfTheEngine checks that the sandbox has no trace of the engine, and that only the workspace is writable.
func noTraceOfTheEngine(t *testing.T, h *hostile) {
	said, _ := h.runs(`
ls -la /var/run/docker.sock /run/docker.sock 2>&1
for s in $(find / -xdev -type s 2>/dev/null); do echo "socket $s"; done
mount -o remount,rw / 2>&1; mknod /tmp/dev b 8 0 2>&1; unshare -Ur id 2>&1; chroot / id 2>&1
echo evil >/spool/bin/runner 2>&1; touch /usr/bin/evil 2>&1; sysctl -w kernel.hostname=evil 2>&1
kill -9 1 && echo killed the runner; sleep 1; echo still here`)
	for _, bad := range []string{"docker.sock\n", "uid=0", "killed the runner\nstill"} {
		if strings.Contains(said, bad) && !strings.Contains(said, "No such file") {
			t.Errorf("%q in\n%s", bad, said)
		}
	}
	if !strings.Contains(said, "still here") || strings.Contains(said, "uid=0") {
		t.Errorf("inside:\n%s", said)
	}
	h.stillAnswers()
}
