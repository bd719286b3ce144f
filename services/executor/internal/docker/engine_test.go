package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/docker/docker/api/types/image"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// asSSH makes the test binary act as the command ssh. Its value is the engine's socket.
const asSSH = "SPOOL_DOCKER_TEST_SSH"

// dialStdio connects stdin and stdout to an engine's socket, as `docker system dial-stdio` does.
func dialStdio() int {
	c, err := net.Dial("unix", os.Getenv(asSSH))
	if err != nil {
		return 1
	}
	go func() {
		_, _ = io.Copy(c, os.Stdin) // its end is the caller's
		_ = c.(*net.UnixConn).CloseWrite()
	}()
	if _, err := io.Copy(os.Stdout, c); err != nil {
		return 1
	}
	return 0
}

// wantCode fails the test unless the error has the code and the remedy.
func wantCode(t testing.TB, what string, err error, code, remedy string) {
	t.Helper()
	var typed *sandbox.Error
	if !errors.As(err, &typed) || typed.Code != code || !strings.Contains(typed.Message, remedy) {
		t.Errorf("%s: %v, want %s with %q", what, err, code, remedy)
	}
}

// everything calls every method of a provider whose engine does not answer.
func everything(t testing.TB, p *Provider) {
	t.Helper()
	ctx := t.Context()
	spec := newSpec(t)
	b := &box{p: p, id: spec.ID, container: "none"}
	var all sync.WaitGroup
	for what, f := range map[string]func() error{
		"create":    func() error { _, err := p.Create(ctx, spec); return err },
		"attach":    func() error { _, err := p.Attach(ctx, spec.ID); return err },
		"list":      func() error { _, err := p.List(ctx); return err },
		"terminate": func() error { return p.Terminate(ctx, spec.ID, true) },
		"pause":     func() error { return p.Pause(ctx, spec.ID) },
		"resume":    func() error { return p.Resume(ctx, spec.ID) },
		"adopt":     func() error { return p.Adopt(ctx, spec.ID, spec.Labels) },
		"state":     func() error { _, err := p.State(ctx, spec.ID); return err },
		"orphans":   func() error { _, err := p.RemoveOrphans(ctx, time.Hour); return err },
		"running":   func() error { _, err := b.Running(ctx); return err },
		"exec":      func() error { _, err := b.Exec(ctx, sandbox.Command{Args: []string{"true"}}); return err },
		"put":       func() error { return b.Files().Put(ctx, "x", strings.NewReader("x")) },
		"get":       func() error { _, err := b.Files().Get(ctx, "x"); return err },
		"files":     func() error { _, err := b.Files().List(ctx, ""); return err },
		"remove":    func() error { return b.Files().Remove(ctx, "x") },
	} {
		all.Go(func() {
			began := time.Now()
			wantCode(t, what, f(), sandbox.CodeEngineUnavailable, "start it")
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("%s took %s", what, took)
			}
		})
	}
	all.Wait()
}

func TestNoEngine(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"unix://" + filepath.Join(t.TempDir(), "none.sock"), "tcp://" + closed.Addr().String()} {
		p := provide(t, Config{Engine: engine, Runner: "none", Image: testImage, Host: host})
		everything(t, p)
		p.cfg.Engine = "x" // a bad spec is the caller's fault, with an engine or without
		if _, err := p.Create(t.Context(), newSpec(t)); err == nil || !strings.Contains(err.Error(), "engine:") {
			t.Errorf("labels of another engine: %v", err)
		}
	}
}

// An engine that accepts connections and never answers blocks no caller for long.
func TestSilentEngine_BlocksNoCaller(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) // the test is over
	p := provide(t, Config{Engine: engine, Runner: "none", Image: testImage, Host: "tcp://" + l.Addr().String()})
	p.within = 100 * time.Millisecond
	everything(t, p)
	// The end of the caller's context is distinguished.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.List(ctx); !errors.Is(err, context.Canceled) || guest.IsUnavailable(err) {
		t.Errorf("after the caller's end: %v", err)
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	good := withRequired(Config{Engine: "e", Runner: "r"})
	for says, spoil := range map[string]func(*Config){
		"required":         func(c *Config) { c.Engine = "" },
		"are required":     func(c *Config) { c.Runner = "" },
		"Limits":           func(c *Config) { c.Limits.MemoryBytes = 0 },
		"must be positive": func(c *Config) { c.TmpBytes = -1 },
		"Files must be":    func(c *Config) { c.Files = 0 },
		"Users":            func(c *Config) { c.Users = UserRange{} },
		"DiskLimit":        func(c *Config) { c.DiskLimit = "" },
		"Layers":           func(c *Config) { c.Layers.Keep = 0 },
		"Host":             func(c *Config) { c.Host = "nonsense" },
		"not supported":    func(c *Config) { c.Host = "ftp://engine" },
		"ssh://user@host":  func(c *Config) { c.Host = "ssh://user:password@engine" },
		"neither the name": func(c *Config) { c.EgressSockets = "a/b" },
	} {
		c := good
		spoil(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// wire is a TCP connection to the engine that a test can cut.
type wire struct {
	t     testing.TB
	host  string
	mu    sync.Mutex
	conns []net.Conn
	cut   bool
}

func newWire(t testing.TB, socket string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{t: t, host: "tcp://" + l.Addr().String()}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { w.carry(c, socket) })
		}
	})
	t.Cleanup(func() {
		w.sever(true)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		all.Wait()
	})
	return w
}

func (w *wire) carry(c net.Conn, socket string) {
	defer c.Close() //nolint:errcheck // a second close changes nothing
	up, err := net.Dial("unix", socket)
	if err != nil {
		w.t.Error(err)
		return
	}
	defer up.Close() //nolint:errcheck // likewise
	w.mu.Lock()
	if w.cut {
		w.mu.Unlock()
		return
	}
	w.conns = append(w.conns, c, up)
	w.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(up, c) // ends with either end
		_ = up.(*net.UnixConn).CloseWrite()
	}()
	_, _ = io.Copy(c, up)
	_ = c.Close()
	<-done
}

// sever closes every connection, and refuses new ones while on is true.
func (w *wire) sever(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = on
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.conns = nil
}

// localSocket returns the engine's socket, for tests that reach the engine in other ways.
func localSocket(t testing.TB, p *Provider) string {
	t.Helper()
	socket, ok := strings.CutPrefix(p.api.DaemonHost(), "unix://")
	if !ok {
		t.Skipf("the engine at %s is not on this machine: there is no socket to put a wire to", p.api.DaemonHost())
	}
	return socket
}

// A remote engine works like a local one: only the connection is shared.
func TestRemote(t *testing.T) {
	cfg := needEngine(t)
	socket := localSocket(t, provide(t, cfg))
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(self, filepath.Join(bin, "ssh")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
	t.Setenv(asSSH, socket)
	for name, host := range map[string]string{"tcp": newWire(t, socket).host, "ssh": "ssh://somebody@engine.example"} {
		t.Run(name, func(t *testing.T) {
			cfg := cfg
			cfg.Host = host
			b := create(t, provide(t, cfg), newSpec(t))
			big := make([]byte, 1<<20)
			if _, err := rand.Read(big); err != nil {
				t.Fatal(err)
			}
			if err := b.Files().Put(t.Context(), "big", bytes.NewReader(big)); err != nil {
				t.Fatal(err)
			}
			r, err := b.Files().Get(t.Context(), "big")
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if err := errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, big) {
				t.Errorf("%d bytes came back, %v", len(got), err)
			}
			proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			if err := proc.Kill(); err != nil {
				t.Error(err)
			}
			if code, err := proc.Wait(); code != -1 || err != nil {
				t.Errorf("killed: %d, %v", code, err)
			}
			if out, _, _ := sh(t, b, `grep -lx sleep /proc/[0-9]*/comm | wc -l`); out != "0" {
				t.Errorf("%s processes were left by a killed command", out)
			}
		})
	}
}

// A connection that breaks during a transfer is an error, never a short file or a successful command.
func TestConnectionBreak_IsAnError(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	direct := provide(t, cfg)
	w := newWire(t, localSocket(t, direct))
	cfg.Host = w.host
	spec := newSpec(t)
	far := create(t, direct, spec)
	far.p = provide(t, cfg)
	near := &box{p: direct, id: far.id, container: far.container}
	if err := near.Files().Put(t.Context(), "old", strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	if _, _, code := sh(t, near, `head -c 50000000 /dev/zero >big`); code != 0 {
		t.Fatal("the big file could not be made")
	}

	proc, err := far.Exec(t.Context(), sandbox.Command{Args: []string{"cat"}})
	if err != nil {
		t.Fatal(err)
	}
	download, err := far.Files().Get(t.Context(), "big")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := download.Read(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	w.sever(true)
	if _, err := io.ReadAll(proc.Stdout()); err != nil {
		wantCode(t, "stdout", err, sandbox.CodeEngineUnavailable, "start it")
	}
	_, err = proc.Wait()
	wantCode(t, "wait", err, sandbox.CodeEngineUnavailable, "start it")
	wantCode(t, "kill", proc.Kill(), sandbox.CodeEngineUnavailable, "start it")
	n, err := io.Copy(io.Discard, download)
	wantCode(t, "download", err, sandbox.CodeEngineUnavailable, "start it")
	if n >= 50000000 {
		t.Errorf("all %d bytes came over a cut wire", n)
	}
	if err := download.Close(); err != nil {
		t.Error(err)
	}
	everything(t, far.p)

	// A break during an upload leaves the file unchanged.
	w.sever(false)
	reader, writer := io.Pipe()
	put := make(chan error, 1)
	go func() { put <- far.Files().Put(t.Context(), "old", reader) }()
	if _, err := writer.Write(make([]byte, 3*guest.ChunkBytes)); err != nil {
		t.Fatal(err)
	}
	w.sever(true)
	go func() {
		for { // until the other side gives up
			if _, err := writer.Write(make([]byte, guest.ChunkBytes)); err != nil {
				return
			}
		}
	}()
	wantCode(t, "upload", <-put, sandbox.CodeEngineUnavailable, "start it")
	if err := reader.Close(); err != nil {
		t.Error(err)
	}
	r, err := near.Files().Get(t.Context(), "old")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); string(got) != "old" || errors.Join(err, r.Close()) != nil {
		t.Errorf("the file is %q now, %v", got, err)
	}
	// After the connection is back everything works.
	w.sever(false)
	if out, _, code := sh(t, far, `ls`); out != "big\nold" || code != 0 {
		t.Errorf("after it: %q, code %d", out, code)
	}
}

// Content whose reader fails with io.ErrUnexpectedEOF or io.EOF in the middle is not stored as a short file.
func TestPut_RefusesShortContent(t *testing.T) {
	t.Parallel()
	files := create(t, provide(t, needEngine(t)), newSpec(t)).Files()
	for _, broken := range []error{io.ErrUnexpectedEOF, io.ErrClosedPipe, guest.ErrStdin} {
		err := files.Put(t.Context(), "x", io.MultiReader(strings.NewReader("half"), iotest.ErrReader(broken)))
		if err == nil {
			t.Errorf("content that broke with %q was put", broken)
		}
	}
	if list, err := files.List(t.Context(), ""); err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
}

// bare creates an image without files on an engine, for an architecture.
func bare(t testing.TB, p *Provider, ref, architecture string) {
	t.Helper()
	archive := func(files map[string][]byte) []byte {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for name, content := range files {
			err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg})
			_, werr := w.Write(content)
			if err := errors.Join(err, werr); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	layer := archive(nil)
	config := fmt.Sprintf(`{"architecture":%q,"os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, architecture, sha256.Sum256(layer))
	loaded, err := p.api.ImageLoad(t.Context(), bytes.NewReader(archive(map[string][]byte{
		"layer.tar": layer, "config.json": []byte(config),
		"manifest.json": []byte(fmt.Sprintf(`[{"Config":"config.json","RepoTags":[%q],"Layers":["layer.tar"]}]`, ref)),
	})))
	if err != nil {
		t.Fatal(err)
	}
	if err := drain(loaded.Body); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := p.api.ImageRemove(context.Background(), ref, image.RemoveOptions{Force: true, PruneChildren: true}); err != nil {
			t.Error(err)
		}
	})
}

func TestIDs_InvalidOnesAreRefused(t *testing.T) {
	t.Parallel()
	p := provide(t, Config{Engine: engine, Runner: "none", Image: testImage})
	for _, id := range []string{"", "../x", "sbx_", newID(t, events.KindSession)} {
		spec := newSpec(t)
		spec.ID = id
		if _, err := p.Create(t.Context(), spec); err == nil {
			t.Errorf("created %q", id)
		}
		if err := p.Terminate(t.Context(), id, true); err == nil {
			t.Errorf("terminated %q", id)
		}
		spec = newSpec(t)
		spec.Workspace = id
		if _, err := p.Create(t.Context(), spec); id != "" && (err == nil || !strings.Contains(err.Error(), "workspace")) {
			t.Errorf("workspace %q: %v", id, err)
		}
	}
}
