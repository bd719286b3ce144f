package docker

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// dockerd is a Docker engine for one test.
type dockerd struct {
	t    testing.TB
	dir  string
	host string
	cmd  *exec.Cmd
}

// newDockerd starts an engine whose data is in a folder, on a separate file system if size is not empty.
func newDockerd(t testing.TB, size string) *dockerd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("an engine of the test's own must be started as root")
	}
	if _, err := exec.LookPath("dockerd"); err != nil {
		t.Skip("there is no dockerd on the PATH")
	}
	dir := t.TempDir()
	d := &dockerd{t: t, dir: dir, host: "unix://" + filepath.Join(dir, "docker.sock")}
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	if size != "" {
		if err := unix.Mount("tmpfs", data, "tmpfs", 0, "size="+size); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		d.stop()
		if size != "" {
			if err := unix.Unmount(data, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	})
	d.start()
	return d
}

func (d *dockerd) start() {
	d.t.Helper()
	log, err := os.OpenFile(filepath.Join(d.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close() //nolint:errcheck // dockerd has its own descriptor
	// In a network namespace of its own: with --bridge none dockerd removes the docker0 of its namespace, which is the machine's engine's.
	d.cmd = exec.Command("dockerd", "--host", d.host, "--data-root", filepath.Join(d.dir, "data"), "--exec-root", filepath.Join(d.dir, "exec"), //nolint:gosec // the test's own folder
		"--pidfile", filepath.Join(d.dir, "pid"), "--bridge", "none", "--iptables=false", "--ip6tables=false")
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	p := provide(d.t, Config{Host: d.host, Engine: engine, Runner: "none"})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(enginePollInterval) {
		_, err := p.api.Ping(d.t.Context())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			raw, _ := os.ReadFile(filepath.Join(d.dir, "log")) // as much as there is
			d.t.Fatalf("dockerd does not answer: %v\n%s", err, raw[max(0, len(raw)-2000):])
		}
	}
}

func (d *dockerd) stop() {
	d.t.Helper()
	if d.cmd == nil {
		return
	}
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		d.t.Error(err)
	}
	if err := d.cmd.Wait(); err != nil {
		d.t.Error(err)
	}
	d.cmd = nil
}

// A stopped engine ends its sandboxes. After its restart they and their files still exist.
func TestEngineRestarts(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	d := newDockerd(t, "")
	cfg.Host = d.host
	p := provide(t, cfg)
	bare(t, p, "spool-test:bare", "amd64")
	cfg.Image = "spool-test:bare"
	cfg.DiskLimit = DiskLimitWatch // the image has no mkfs
	p = provide(t, cfg)
	spec := newSpec(t)
	b := create(t, p, spec)
	if err := b.Files().Put(t.Context(), "mark", strings.NewReader("here")); err != nil {
		t.Fatal(err)
	}
	proc, _ := attached(t, b)
	d.stop()
	_, err := proc.Wait()
	wantCode(t, "wait", err, sandbox.CodeEngineUnavailable, "start it")
	everything(t, p)
	d.start()
	if _, err := p.Attach(t.Context(), spec.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("attach after the restart: %v", err)
	}
	if alive, err := b.Running(t.Context()); alive || err != nil {
		t.Errorf("runs after the restart: %v, %v", alive, err)
	}
	again, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if !again.(*box).HasWorkspace() {
		t.Error("the workspace is said to be new")
	}
	r, err := again.Files().Get(t.Context(), "mark")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); string(got) != "here" || errors.Join(err, r.Close()) != nil {
		t.Errorf("mark is %q, %v", got, err)
	}
}

// A full disk of the engine has an error code, and existing files stay complete.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	d := newDockerd(t, "192m")
	cfg.Host = d.host
	cfg.Image = "spool-test:bare"
	cfg.DiskLimit = DiskLimitWatch // the image has no mkfs
	p := provide(t, cfg)
	bare(t, p, cfg.Image, "amd64")
	b := create(t, p, newSpec(t))
	if err := b.Files().Put(t.Context(), "mark", strings.NewReader("here")); err != nil {
		t.Fatal(err)
	}
	zeros := io.LimitReader(zero{}, 1<<30)
	wantCode(t, "put", b.Files().Put(t.Context(), "mark", zeros), sandbox.CodeDiskFull, "remove")
	list, err := b.Files().List(t.Context(), "")
	if err != nil || len(list) != 1 || list[0].Size != 4 {
		t.Errorf("after the full disk: %+v, %v", list, err)
	}
	if err := os.WriteFile(filepath.Join(d.dir, "data", "filler"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	filler, err := os.OpenFile(filepath.Join(d.dir, "data", "filler"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(filler, zero{}); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := filler.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = p.Create(t.Context(), newSpec(t))
	wantCode(t, "create", err, sandbox.CodeDiskFull, "remove")
	if err := os.Remove(filepath.Join(d.dir, "data", "filler")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil { // what the failure left
		t.Error(err)
	}
	create(t, p, newSpec(t))
}

// zero is an endless reader of zero bytes.
type zero struct{}

func (zero) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// When an engine freezes with open connections, callers that wait for it return an error.
func TestFrozenEngine_ReleasesItsCallers(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	d := newDockerd(t, "")
	cfg.Host, cfg.Image = d.host, "spool-test:bare"
	cfg.DiskLimit = DiskLimitWatch // the image has no mkfs
	first := provide(t, cfg)
	bare(t, first, cfg.Image, "amd64")
	spec := newSpec(t)
	create(t, first, spec)
	p := provide(t, cfg)
	p.within, p.watch.every = 2*time.Second, 50*time.Millisecond
	found, err := p.Attach(t.Context(), spec.ID)
	if err != nil {
		t.Fatal(err)
	}
	b := found.(*box)
	proc, stream := attached(t, b)
	if _, err := stream.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	reader, writer := io.Pipe()
	put := make(chan error, 1)
	go func() { put <- b.Files().Put(t.Context(), "x", reader) }()
	if _, err := writer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(io.Discard, proc.Stdout())
	wantCode(t, "attach", err, sandbox.CodeEngineUnavailable, "start it")
	_, err = proc.Wait()
	wantCode(t, "wait", err, sandbox.CodeEngineUnavailable, "start it")
	if err := writer.CloseWithError(io.ErrUnexpectedEOF); err != nil {
		t.Error(err)
	}
	if err := <-put; err == nil {
		t.Error("a file was put into an engine that stands still")
	}
	everything(t, p)
	if err := d.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.p = first
	if alive, err := b.Running(t.Context()); !alive || err != nil {
		t.Errorf("the sandbox runs: %v, %v", alive, err)
	}
	if list, err := b.Files().List(t.Context(), ""); err != nil || len(list) != 0 {
		t.Errorf("files: %+v, %v", list, err)
	}
}
