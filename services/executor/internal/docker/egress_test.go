package docker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// Several executors start the proxy concurrently, and there is one. A sandbox reaches a model through it without having
// the key. The call is journaled, and the proxy outlives the executors.
func TestEgressProxy(t *testing.T) {
	t.Parallel()
	bed := newEgressBed(t)
	url, asked := upstream(t)
	env := map[string]string{"ANTHROPIC_API_KEY": egressKey, "SPOOL_ANTHROPIC_BASE_URL": url}
	var all sync.WaitGroup
	for range 3 {
		e := bed.proxy(env)
		for range 2 {
			all.Go(func() {
				if err := e.EnsureRunning(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	e := bed.proxy(env)
	p := e.p
	first := checkEgressContainer(t, e)

	client, dials := reach(t, e)
	spec := newSpec(t)
	spec.Labels.Engine, spec.EgressToken = bed.cfg.Engine, "token-of-the-sandbox"
	if s, err := client.Register(t.Context(), spec.ID, api.Registration{Token: spec.EgressToken, Tenant: "default", Epoch: 1, Execution: newID(t, events.KindExecution), Allow: []string{}}); err != nil || s.Epoch != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	b := create(t, p, spec)
	ask := func() string {
		out, errs, code := sh(t, b, `bash -c 'exec 3<>/dev/tcp/127.0.0.1/7070
			printf "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" >&3; cat <&3'`)
		if code != 0 {
			t.Errorf("exit code %d: %s", code, errs)
		}
		return out
	}
	if out := ask(); !strings.Contains(out, "from the model") {
		t.Errorf("the model says %q", out)
	}
	if got := asked(); !slices.Equal(got, []string{"/v1/messages " + egressKey}) {
		t.Errorf("the model was asked %q", got)
	}
	waitLines(t, client, spec.ID, 1)
	if n := dials(); n != 1 {
		t.Errorf("%d connections for requests one after the other", n)
	}
	out, _, _ := sh(t, b, `env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n'; ls -a /run/spool/egress`)
	if strings.Contains(out, egressKey) || !strings.Contains(out, "egress.sock") {
		t.Errorf("a sandbox sees %s", out)
	}

	// Sweeps remove neither the proxy nor its volumes, also while the proxy is absent.
	time.Sleep(1100 * time.Millisecond) // the engine's dates are whole seconds
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil {
		t.Error(err)
	}
	if list, err := p.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("sandboxes: %+v, %v", list, err)
	}
	if got, err := e.findContainer(t.Context()); err != nil || got != first {
		t.Errorf("after a sweep: %q, %v", got, err)
	}
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
		t.Error(err)
	}
	if err := p.removeContainer(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil {
		t.Error(err)
	}

	// After its removal by hand the proxy is created again when it is needed, with its data.
	poll(t, "a new proxy", func() error {
		s, err := client.State(t.Context(), spec.ID)
		if err == nil && s.Epoch != 1 {
			err = fmt.Errorf("it knows %+v", s)
		}
		return err
	})
	second, err := e.findContainer(t.Context())
	if err != nil || second == "" || second == first {
		t.Errorf("container %q after %q, %v", second, first, err)
	}
	if said := bed.log.take(); said != "" {
		t.Errorf("logged: %s", said)
	}
}

// checkEgressContainer checks the container's configuration, and returns its id.
func checkEgressContainer(t *testing.T, e *EgressProxy) string {
	t.Helper()
	list, err := e.p.api.ContainerList(t.Context(), container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", labelEngine+"="+e.p.cfg.Engine))})
	if err != nil || len(list) != 1 || !slices.Equal(list[0].Names, []string{"/" + e.ContainerName()}) {
		t.Fatalf("containers: %+v, %v", list, err)
	}
	got, err := e.p.api.ContainerInspect(t.Context(), list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	h := got.HostConfig
	if got.Config.User != "10002:10002" || !h.ReadonlyRootfs || h.Privileged || !slices.Equal(h.CapDrop, []string{"ALL"}) || len(h.CapAdd) > 0 ||
		!slices.Equal(h.SecurityOpt, []string{"no-new-privileges"}) || h.RestartPolicy.Name != container.RestartPolicyUnlessStopped || h.NetworkMode != "host" ||
		h.Memory == 0 || h.PidsLimit == nil || *h.PidsLimit <= 0 || len(h.Binds) > 0 || len(got.Mounts) != 2 {
		t.Errorf("it was made with %+v, %+v", got.Config, h)
	}
	return got.ID
}

// poll calls f until it returns no error, or the time limit is reached.
func poll(t testing.TB, what string, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(enginePollInterval) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func waitLines(t *testing.T, c *api.Client, id string, want int) {
	t.Helper()
	poll(t, "lines", func() error {
		lines, err := c.JournalLines(t.Context(), id, "", 0, false)
		if err != nil || len(lines) != want {
			return fmt.Errorf("%d lines, %w", len(lines), err)
		}
		if lines[0].Type != (events.ModelCalled{}).EventType() || !strings.Contains(string(lines[0].Data), "claude-x") {
			t.Errorf("line %s %s", lines[0].Type, lines[0].Data)
		}
		return nil
	})
}

// A connection is a net.Conn: it has deadlines, several can be open, and a closed one leaves nothing in the container.
func TestEgressDial(t *testing.T) {
	t.Parallel()
	bed := newEgressBed(t)
	e := bed.proxy(nil)
	var conns []net.Conn
	for range 3 {
		c, err := e.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	begin := time.Now()
	if err := conns[0].SetReadDeadline(begin.Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var late net.Error
	if n, err := conns[0].Read(make([]byte, 1)); n != 0 || !errors.As(err, &late) || !late.Timeout() {
		t.Errorf("at the deadline: %d, %v", n, err)
	}
	for i, c := range conns { // also the one whose deadline passed
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "GET /healthz HTTP/1.0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if out, err := io.ReadAll(c); err != nil || !strings.Contains(string(out), `{"status":"ok"}`) {
			t.Errorf("%d: %q, %v", i, out, err)
		}
	}
	open, err := e.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	reading := make(chan error, 1)
	go func() { _, err := open.Read(make([]byte, 1)); reading <- err }()
	for _, c := range append(conns, open) {
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := <-reading; err == nil {
		t.Error("a closed connection can be read")
	}
	if _, err := open.Write([]byte("x")); err == nil {
		t.Error("a closed connection can be written")
	}
	poll(t, "the commands' end", func() error {
		top, err := e.p.api.ContainerTop(t.Context(), e.running.id, nil)
		if err == nil && len(top.Processes) != 1 {
			err = fmt.Errorf("processes: %v", top.Processes)
		}
		return err
	})

	// Stopping the proxy ends a connection; the next connection starts the proxy again.
	c, err := e.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	res, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := drain(res.Body); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("%s, %v", res.Status, err)
	}
	if err := e.p.api.ContainerStop(t.Context(), e.running.id, container.StopOptions{}); err != nil {
		t.Fatal(err)
	}
	if out, err := io.ReadAll(in); len(out) > 0 {
		t.Errorf("from a proxy that has ended comes %q, %v", out, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	client, _ := reach(t, e)
	poll(t, "health", func() error { return client.Health(t.Context()) })
	if said := bed.log.take(); said != "" {
		t.Errorf("logged: %s", said)
	}
}

// Different settings of an existing proxy are logged, without their values, and the proxy is not changed.
func TestEgressDiffers(t *testing.T) {
	t.Parallel()
	bed := newEgressBed(t)
	env := map[string]string{"ANTHROPIC_API_KEY": egressKey, "OPENAI_API_KEY": ""}
	e := bed.proxy(env)
	if err := e.EnsureRunning(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, err := e.findContainer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other := maps.Clone(env)
	other["ANTHROPIC_API_KEY"] = "sk-another"
	another := bed.proxy(other)
	another.cfg.Network = "none"
	egressImage(t, another.p, bed.image, "a newer one", `ENTRYPOINT ["/egress"]`)
	for range 2 {
		if err := another.EnsureRunning(t.Context()); err != nil {
			t.Fatal(err)
		}
		another.forgetContainer(another.running)
	}
	said := bed.log.take()
	for _, want := range []string{"[image network ANTHROPIC_API_KEY]", "docker stop " + e.ContainerName(), "docker rm -f " + e.ContainerName()} {
		if !strings.Contains(said, want) {
			t.Errorf("logged without %q: %s", want, said)
		}
	}
	if strings.Contains(said, "sk-") || strings.Count(said, "\n") != 1 {
		t.Errorf("logged: %s", said)
	}
	if id, err := e.findContainer(t.Context()); err != nil || id != first {
		t.Errorf("container %q after %q, %v", id, first, err)
	}
	// If the image is not on the engine any more, the names are compared.
	gone := bed.proxy(env)
	gone.cfg.Image = "spool-test/no-such"
	if err := gone.EnsureRunning(t.Context()); err != nil {
		t.Error(err)
	}
	if said := bed.log.take(); !strings.Contains(said, "differs=[image]") {
		t.Errorf("logged: %s", said)
	}
}

// Settings that cannot work return an error with the reason, and leave no container that would block better settings.
func TestEgressProxyFails(t *testing.T) {
	t.Parallel()
	bed := newEgressBed(t)
	ctx := t.Context()
	none := bed.proxy(nil)
	none.cfg.Image = "spool-test/no-such:1"
	wantCode(t, "no image", none.EnsureRunning(ctx), sandbox.CodeImageNotFound, "no-such")
	network := bed.proxy(nil)
	network.cfg.Network = "spool-test-no-such"
	if err := network.EnsureRunning(ctx); err == nil || !strings.Contains(err.Error(), "spool-test-no-such") {
		t.Errorf("no network: %v", err)
	}
	if err := bed.proxy(map[string]string{"SPOOL_ANTHROPIC_BASE_URL": "ftp://x"}).EnsureRunning(ctx); err == nil || !strings.Contains(err.Error(), "anthropic-base-url") {
		t.Errorf("a bad setting: %v", err)
	}
	silent := bed.proxy(nil)
	silent.cfg.Image = testImage
	wantCode(t, "no entrypoint", silent.EnsureRunning(ctx), sandbox.CodeImageUnsupported, "entrypoint")
	if _, err := NewEgressProxy(silent.p, EgressConfig{}); err == nil || !strings.Contains(err.Error(), "Image") {
		t.Errorf("no image: %v", err)
	}
	if _, err := none.p.api.ContainerInspect(ctx, none.ContainerName()); !errdefs.IsNotFound(err) {
		t.Errorf("a container stays: %v", err)
	}
	// If another container has the name, it is not changed.
	made, err := none.p.api.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: []string{"true"}}, nil, nil, nil, none.ContainerName())
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, "the name is taken", bed.proxy(nil).EnsureRunning(ctx), sandbox.CodeSandboxFailed, "rename it")
	if got, err := none.p.api.ContainerInspect(ctx, none.ContainerName()); err != nil || got.ID != made.ID {
		t.Errorf("%v, %v", got.ID, err)
	}
}

// While the engine does not answer, the error says so. When it answers again, the proxy starts.
func TestEgressEngineAway(t *testing.T) {
	t.Parallel()
	bed := newEgressBed(t)
	w := newWire(t, localSocket(t, provide(t, bed.cfg)))
	w.sever(true)
	bed.cfg.Host = w.host
	e := bed.proxy(nil)
	client, _ := reach(t, e)
	wantCode(t, "ensure", e.EnsureRunning(t.Context()), sandbox.CodeEngineUnavailable, "start it")
	_, err := client.State(t.Context(), newID(t, events.KindSandbox))
	wantCode(t, "state", err, sandbox.CodeEngineUnavailable, "start it")
	w.sever(false)
	if err := client.Health(t.Context()); err != nil {
		t.Error(err)
	}
	// If the connection breaks during a request, the request fails, and the next one uses a new connection.
	w.sever(true)
	if err := client.Health(t.Context()); err == nil {
		t.Error("well without an engine")
	}
	w.sever(false)
	poll(t, "health", func() error { return client.Health(t.Context()) })
}
