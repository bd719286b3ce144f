package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// registryWords is the fake registry's error text, which must not reach a tenant.
const registryWords = "what-a-host-of-the-network-says"

// registry is a fake registry on loopback, which engines use over plain HTTP. It refuses everything, and names another
// of its servers for tokens.
type registry struct {
	addr        string
	connections atomic.Int64
}

func newRegistry(t *testing.T) *registry {
	t.Helper()
	r := &registry{}
	serve := func(handle http.HandlerFunc) string {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: handle, ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				r.connections.Add(1)
			}
		}}
		var done sync.WaitGroup
		done.Go(func() { _ = s.Serve(l) }) // until it is closed
		t.Cleanup(func() {
			_ = s.Close()
			done.Wait()
		})
		return l.Addr().String()
	}
	realm := serve(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"details":"`+registryWords+` no space left on device"}`)
	})
	r.addr = serve(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+realm+`/token",service="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"`+registryWords+`"}]}`)
	})
	return r
}

// uses makes the engine use an image in every way that a tenant can.
func uses(t *testing.T, p *Provider, image string) map[string]error {
	t.Helper()
	errs := map[string]error{}
	spec := newSpec(t)
	spec.Image = image
	_, errs["a sandbox"] = p.Create(t.Context(), spec)
	b := withServers(t, p, 1)
	_, errs["an MCP server"] = p.StartServer(t.Context(), b.id, 0, sandbox.MCPServer{Image: image})
	_, errs["a layer"] = p.Layer(t.Context(), sandbox.LayerPackages{Image: image}, sandbox.LayerBuilder{})
	return errs
}

// An image that is not allowed is refused before the engine gets its name. An allowed one that is absent is not pulled.
// No host gets a request for either.
func TestImages_ThatAreNotAllowedReachNobody(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	r := newRegistry(t)
	cfg.Images = imagepolicy.Policy{} // of tests: all
	for what, err := range uses(t, provide(t, cfg), r.addr+"/x:1") {
		wantCode(t, what, err, sandbox.CodeImageNotAllowed, "SPOOL_SANDBOX_IMAGES")
		if strings.Contains(err.Error(), registryWords) {
			t.Errorf("%s: %v", what, err)
		}
	}
	var err error
	if cfg.Images, err = imagepolicy.Parse("sandbox-images", []string{r.addr + "/*"}); err != nil {
		t.Fatal(err)
	}
	for what, err := range uses(t, provide(t, cfg), r.addr+"/x:1") {
		wantCode(t, what, err, sandbox.CodeImageNotFound, "is not on the engine")
	}
	if n := r.connections.Load(); n != 0 {
		t.Errorf("the engine made %d connections to a host that a tenant named", n)
	}
}

// A registry's answer to a pull is logged, and not returned to a tenant.
func TestImages_PullErrorsAreTheOperatorsAlone(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	r := newRegistry(t)
	cfg.Pull = true
	var log safeBuffer
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	for what, err := range uses(t, provide(t, cfg), r.addr+"/x:1") {
		wantCode(t, what, err, sandbox.CodeImageNotFound, "cannot be pulled")
		for cause := err; cause != nil; cause = errors.Unwrap(cause) {
			if strings.Contains(cause.Error(), registryWords) || strings.Contains(cause.Error(), "no space") {
				t.Errorf("%s: %v", what, cause)
			}
		}
	}
	if r.connections.Load() == 0 {
		t.Error("the engine did not ask the registry")
	}
	if !strings.Contains(log.String(), registryWords) {
		t.Errorf("the log does not say why: %s", log.String())
	}
}

// A registry that never ends its answer delays a sandbox for a limited time, and does not delay other images.
func TestImages_RegistryThatIsSlowForEver(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	asked := make(chan struct{}, 1)
	over := make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
		for {
			_, _ = io.WriteString(w, " ")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-over:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}))
	t.Cleanup(slow.Close)
	t.Cleanup(func() { close(over) })
	cfg.Pull = true
	p := provide(t, cfg)
	p.pullWithin = 3 * time.Second
	spec := newSpec(t)
	spec.Image = strings.TrimPrefix(slow.URL, "http://") + "/x:1"

	gaveUp, cancel := context.WithCancel(t.Context())
	early := make(chan error, 1)
	go func() {
		_, err := p.Create(gaveUp, spec)
		early <- err
	}()
	<-asked
	cancel()
	if err := <-early; !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up got %v", err)
	}
	create(t, p, newSpec(t)) // of another image
	spec.ID = newSpec(t).ID
	_, err := p.Create(t.Context(), spec)
	wantCode(t, "the slow image", err, sandbox.CodeImageNotFound, "was not pulled within 3s")
}

// The engine gets the names of allowed images only. For absent images without pulls it gets only an inspection, and its
// answer to a pull is not returned.
func TestImage_OfTheEngineThatIsTold(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var told []string
	fake := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.47")
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/_ping") {
			return
		}
		mu.Lock()
		told = append(told, r.Method)
		mu.Unlock()
		w.WriteHeader(map[string]int{http.MethodGet: http.StatusNotFound, http.MethodPost: http.StatusInternalServerError}[r.Method])
		_, _ = io.WriteString(w, `{"message":"`+registryWords+` no space left on device"}`)
	}))
	t.Cleanup(fake.Close)
	list, err := imagepolicy.Parse("sandbox-images", []string{"10.0.0.7:5000/*"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, image string
		pull        bool
		code, told  string
	}{
		{"another host", "10.0.0.8:5000/x", true, sandbox.CodeImageNotAllowed, "[]"},
		{"an ID of the engine's", "sha256:" + strings.Repeat("0a", 32), true, sandbox.CodeImageNotAllowed, "[]"},
		{"no name", "A B", true, sandbox.CodeImageNotAllowed, "[]"},
		{"one of the list", "10.0.0.7:5000/x", false, sandbox.CodeImageNotFound, "[GET]"},
		{"one of the list, with pulls", "10.0.0.7:5000/x", true, sandbox.CodeImageNotFound, "[GET POST]"},
		{"the operator's own", "own:1", false, sandbox.CodeImageNotFound, "[GET POST]"},
	} {
		told = nil
		var log safeBuffer
		p := provide(t, Config{Engine: engine, Runner: "none", Image: "own:1", Images: list, Pull: c.pull, Host: "tcp://" + fake.Listener.Addr().String(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
		_, err := p.lookUpAllowedImage(t.Context(), imageFields, c.image)
		wantCode(t, c.name, err, c.code, "the operator")
		for cause := err; cause != nil; cause = errors.Unwrap(cause) {
			if strings.Contains(cause.Error(), registryWords) || strings.Contains(cause.Error(), "no space") {
				t.Errorf("%s: %v", c.name, cause)
			}
		}
		if got := fmt.Sprint(told); got != c.told {
			t.Errorf("%s: the engine was told %s, want %s", c.name, got, c.told)
		}
		if pulled := strings.Contains(c.told, "POST"); pulled != strings.Contains(log.String(), registryWords) {
			t.Errorf("%s: the log has %s", c.name, log.String())
		}
	}
}

// safeBuffer is text that several goroutines write.
type safeBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
