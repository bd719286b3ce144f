package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/docker/docker/api/types/image"

	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

var buildEgress = sync.OnceValues(func() ([]byte, error) {
	path := filepath.Join(scratch, "egress")
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", path, "../../cmd/egress")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, errors.New(string(out))
	}
	return os.ReadFile(path)
})

// egressImage loads an image with only the egress program into the engine. more is appended to the program, so that the
// image differs.
func egressImage(t testing.TB, p *Provider, ref, more string, changes ...string) {
	t.Helper()
	program, err := buildEgress()
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err = w.WriteHeader(&tar.Header{Name: "egress", Mode: 0o555, Size: int64(len(program) + len(more)), Typeflag: tar.TypeReg})
	_, werr := io.WriteString(w, string(program)+more)
	if err := errors.Join(err, werr, w.Close()); err != nil {
		t.Fatal(err)
	}
	done, err := p.api.ImageImport(t.Context(), image.ImportSource{Source: &layer, SourceName: "-"}, ref, image.ImportOptions{Changes: changes})
	if err != nil {
		t.Fatal(err)
	}
	if err := drain(done); err != nil {
		t.Fatal(err)
	}
	made, err := p.api.ImageInspect(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := p.api.ImageRemove(context.Background(), made.ID, image.RemoveOptions{Force: true, PruneChildren: true}); err != nil {
			t.Error(err)
		}
	})
}

// egressBed is an engine's name with an image for its proxy. Everything is removed with the test.
type egressBed struct {
	t     testing.TB
	cfg   Config
	image string
	log   *logRecorder
}

func newEgressBed(t testing.TB, changes ...string) *egressBed {
	t.Helper()
	cfg := needEngine(t)
	cfg.Engine = engine + "-" + strings.ToLower(t.Name())
	cfg.EgressSockets = EgressVolume(cfg.Engine)
	bed := &egressBed{t: t, image: "spool-test/egress-" + strings.ToLower(t.Name()+engine[len("test-"):]), log: &logRecorder{}}
	cfg.Logger = slog.New(slog.NewTextHandler(bed.log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	bed.cfg = cfg
	p := provide(t, cfg)
	if changes == nil {
		changes = []string{`ENTRYPOINT ["/egress"]`}
	}
	egressImage(t, p, bed.image, "", changes...)
	t.Cleanup(func() {
		err := p.removeContainer(context.Background(), EgressVolume(cfg.Engine))
		for _, v := range []string{EgressVolume(cfg.Engine), egressDataVolume(cfg.Engine)} {
			_, rerr := p.removeVolume(context.Background(), v)
			err = errors.Join(err, rerr)
		}
		if err != nil {
			t.Error(err)
		}
	})
	return bed
}

// proxy returns the proxy of another executor. Some machines that run the tests have no bridge, so it uses the host's
// network.
func (bed *egressBed) proxy(env map[string]string) *EgressProxy {
	bed.t.Helper()
	e, err := NewEgressProxy(provide(bed.t, bed.cfg), EgressConfig{Image: bed.image, Network: "host", Env: env})
	if err != nil {
		bed.t.Fatal(err)
	}
	return e
}

// logRecorder records log messages.
type logRecorder struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logRecorder) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// take returns the messages since the last call.
func (l *logRecorder) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.buf.Reset()
	return l.buf.String()
}

// reach returns a client over a proxy's Dial, and a function that counts connections.
func reach(t testing.TB, e *EgressProxy) (*api.Client, func() int) {
	t.Helper()
	var mu sync.Mutex
	n := 0
	c := api.NewClient(func(ctx context.Context) (net.Conn, error) {
		mu.Lock()
		n++
		mu.Unlock()
		return e.Dial(ctx)
	})
	t.Cleanup(c.Close)
	return c, func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

const egressKey = "sk-of-the-operator"

// upstream starts a server in place of a model API.
func upstream(t testing.TB) (url string, keys func() []string) {
	t.Helper()
	var mu sync.Mutex
	var got []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		got = append(got, r.URL.Path+" "+r.Header.Get("X-Api-Key"))
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"model":"claude-x","usage":{"input_tokens":3,"output_tokens":4},"content":"from the model"}`) // a client that is gone needs no answer
	}))
	t.Cleanup(s.Close)
	return s.URL, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(got)
	}
}
