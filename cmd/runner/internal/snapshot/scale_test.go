package snapshot_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// enough is more memory in bytes than a runner may use for files of any size.
const enough = 96 << 20

// folder is a store on disk, which records the largest memory use at its calls.
type folder struct {
	dir  string
	peak uint64
}

func (f *folder) note() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	f.peak = max(f.peak, m.HeapInuse)
}

func (f *folder) path(name string) string {
	return filepath.Join(f.dir, strings.ReplaceAll(name, "/", "_"))
}

func (f *folder) Put(_ context.Context, name string, r io.Reader) error {
	f.note()
	w, err := os.Create(f.path(name))
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

func (f *folder) Get(_ context.Context, name string) (io.ReadCloser, error) {
	f.note()
	return os.Open(f.path(name))
}

func (f *folder) Has(_ context.Context, name string) (bool, error) {
	_, err := os.Stat(f.path(name))
	return err == nil, nil
}

// Neither side holds a whole file in memory. The test does not run in parallel, because it measures the memory of this
// process.
func TestLargeFile_IsNotHeldInMemory(t *testing.T) { //nolint:paralleltest // see above
	const size = 300 << 20
	b, store := newBox(t).measured(t), &folder{dir: t.TempDir()}
	path := filepath.Join(b.workspace, "large")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	_, err = io.Copy(w, io.LimitReader(rand.NewChaCha8([32]byte{1}), size))
	if err = errors.Join(err, w.Flush(), f.Close(), os.Truncate(path, size+(1<<30))); err != nil { // and a hole of 1 GiB
		t.Fatal(err)
	}
	old(t, b.workspace)
	runtime.GC()
	store.note()
	base := store.peak
	first := take(t, b, store, "")
	t.Logf("snapshot %v, runner's peak %d MiB, host's heap %d MiB", first.Duration, b.peak(t)>>20, store.peak>>20)
	if first.NewBytes != size+1<<20 || b.peak(t) > enough || store.peak > base+enough {
		t.Errorf("snapshot %+v: peak %d, host %d over %d", first, b.peak(t), store.peak, base)
	}
	if f, err = os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0); err == nil {
		_, err = f.WriteString("appended")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	second := take(t, b, store, first.ID)
	if second.NewBytes != 8 {
		t.Errorf("after 8 bytes more: %+v", second)
	}
	to := newBox(t).measured(t)
	r := restore(t, to, store, second.ID)
	t.Logf("restore %v, runner's peak %d MiB, host's heap %d MiB", r.Duration, to.peak(t)>>20, store.peak>>20)
	if to.peak(t) > enough || store.peak > base+enough {
		t.Errorf("restore: peak %d, host %d over %d", to.peak(t), store.peak, base)
	}
	if !equalFiles(t, path, filepath.Join(to.workspace, "large")) {
		t.Error("what came back differs")
	}
}

func equalFiles(t *testing.T, a, b string) bool {
	t.Helper()
	var files [2]*os.File
	for i, path := range []string{a, b} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close() //nolint:errcheck // only read
		files[i] = f
	}
	bufs := [2][]byte{make([]byte, 1<<20), make([]byte, 1<<20)}
	for {
		n, err1 := io.ReadFull(files[0], bufs[0])
		m, err2 := io.ReadFull(files[1], bufs[1])
		if n != m || string(bufs[0][:n]) != string(bufs[1][:m]) {
			return false
		}
		if err1 != nil || err2 != nil {
			return err1 != nil && err2 != nil
		}
	}
}

// fill makes n small files, a hundred in a folder.
func fill(t testing.TB, b *box, n int) {
	t.Helper()
	for i := range n {
		put(t, b.workspace, fmt.Sprintf("pkg%04d/file%02d.js", i/100, i%100), fmt.Sprintf("module.exports = %d\n%s", i, strings.Repeat("x", i%2000)))
	}
	old(t, b.workspace)
}

func TestManyFiles_TakeBoundedMemory(t *testing.T) {
	t.Parallel()
	const files = 20_000
	b, store := newBox(t).measured(t), &workspacetest.MemoryStore{}
	fill(t, b, files)
	first := take(t, b, store, "")
	if first.Files != files || b.peak(t) > enough {
		t.Errorf("first: %+v, peak %d", first, b.peak(t))
	}
	t.Logf("first %v, %d objects, runner's peak %d MiB", first.Duration, len(store.ObjectNames()), b.peak(t)>>20)
	again := take(t, b, store, first.ID)
	if again.ID != first.ID || again.ReadBytes != 0 || again.Files != files {
		t.Errorf("unchanged: %+v", again)
	}
	t.Logf("unchanged %v, runner's peak %d MiB", again.Duration, b.peak(t)>>20)
	put(t, b.workspace, "pkg0001/file00.js", "changed")
	one := take(t, b, store, first.ID)
	if one.NewBytes != 7 || one.ReadBytes != 7 {
		t.Errorf("one changed: %+v", one)
	}
	t.Logf("one changed %v, runner's peak %d MiB", one.Duration, b.peak(t)>>20)
	to := newBox(t).measured(t)
	back := restore(t, to, store, one.ID)
	t.Logf("restore %v, runner's peak %d MiB", back.Duration, to.peak(t)>>20)
	if back.Files != files || to.peak(t) > enough {
		t.Errorf("restored: %+v, peak %d", back, to.peak(t))
	}
	if r := take(t, to, store, one.ID); r.ID != one.ID || r.ReadBytes > 7 {
		t.Errorf("after restore: %+v", r)
	}
}

// BenchmarkSnapshot measures over a real NATS, which syncs each write.
func BenchmarkSnapshot(b *testing.B) {
	for _, files := range []int{20_000, 100_000} {
		b.Run(fmt.Sprint(files), func(b *testing.B) {
			js, err := jetstream.New(natstest.Conn(b, natstest.Run(b)))
			if err == nil {
				err = topology.Provision(b.Context(), js, topology.ProvisionConfig{})
			}
			if err != nil {
				b.Fatal(err)
			}
			store, err := natsstore.Open(b.Context(), js, topology.BucketWorkspaces)
			if err != nil {
				b.Fatal(err)
			}
			box := newBox(b).measured(b)
			fill(b, box, files)
			sum := map[string]time.Duration{}
			var peak int64
			measure := func(what string, f func() workspace.Result) workspace.Result {
				r := f()
				sum[what+"-ms"] += r.Duration
				sum[what+"-runner-cpu-ms"] += box.last.cmd.ProcessState.UserTime() + box.last.cmd.ProcessState.SystemTime()
				peak = max(peak, box.peak(b))
				return r
			}
			for i := range b.N {
				if err := os.RemoveAll(filepath.Join(box.state, ".spool-index")); err != nil {
					b.Fatal(err)
				}
				put(b, box.workspace, "turn", fmt.Sprint(i))
				o := options
				o.Session = fmt.Sprintf("ses_%d", i)
				snap := func() workspace.Result {
					r, err := workspace.Snapshot(b.Context(), box, store, o)
					if err != nil {
						b.Fatal(err)
					}
					return r
				}
				o.Previous = measure("first", snap).ID
				put(b, box.workspace, "turn", fmt.Sprint(i, "changed"))
				old(b, filepath.Join(box.workspace, "turn"))
				o.Previous = measure("one-changed", snap).ID
				measure("unchanged", snap)
				measure("restore", func() workspace.Result {
					r, err := workspace.Restore(b.Context(), box, store, o.Tenant, o.Session, o.Previous)
					if err != nil {
						b.Fatal(err)
					}
					return r
				})
			}
			for what, d := range sum {
				b.ReportMetric(float64(d.Milliseconds())/float64(b.N), what)
			}
			b.ReportMetric(float64(peak>>20), "runner-peak-MiB")
		})
	}
}
