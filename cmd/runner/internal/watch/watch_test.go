package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits every wait.
const patience = 30 * time.Second

// record is a sink that records the reports.
type record struct {
	mu        sync.Mutex
	lines     []string
	logs      []string
	execution string
	gate      chan struct{} // if not nil, JournalEvents blocks until it is closed
	news      chan struct{} // has a token after a report
}

func (r *record) JournalEvents(ctx context.Context, payloads ...events.Payload) string {
	if r.gate != nil {
		select {
		case <-r.gate:
		case <-ctx.Done():
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range payloads {
		switch e := p.(type) {
		case events.FileCreated:
			r.lines = append(r.lines, fmt.Sprintf("+%s %d%s", e.Path, e.Size, map[bool]string{true: "b"}[e.Binary]))
		case events.FileModified:
			r.lines = append(r.lines, fmt.Sprintf("~%s %d%s", e.Path, e.Size, map[bool]string{true: "b"}[e.Binary]))
		case events.FileDeleted:
			r.lines = append(r.lines, "-"+e.Path)
		case events.Log:
			r.logs = append(r.logs, e.Message)
		}
	}
	select {
	case r.news <- struct{}{}:
	default:
	}
	return r.execution
}

// take returns the reports since the last call, sorted.
func (r *record) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.lines)
	out := strings.Join(r.lines, ", ")
	r.lines = nil
	return out
}

func (r *record) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := strings.Join(r.logs, "\n")
	r.logs = nil
	return out
}

// scene is a watched workspace.
type scene struct {
	t    *testing.T
	dir  string
	w    *Watcher
	sink *record
}

// watch starts a watcher of a workspace that the function has filled.
func watch(t *testing.T, fill func(*scene), cfg Config) *scene {
	t.Helper()
	base := t.TempDir()
	s := &scene{t: t, dir: filepath.Join(base, "ws"), sink: &record{news: make(chan struct{}, 1)}}
	s.mkdir(".")
	if fill != nil {
		fill(s)
	}
	cfg.Dir, cfg.Sink = s.dir, s.sink
	var err error
	if s.w, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	s.flush()
	return s
}

func (s *scene) flush() { s.t.Helper(); s.w.Flush(s.t.Context()) }

func (s *scene) absolute(rel string) string { return filepath.Join(s.dir, rel) }

func (s *scene) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) mkdir(rel string) { s.t.Helper(); s.must(os.MkdirAll(s.absolute(rel), 0o755)) }

func (s *scene) write(rel, content string) {
	s.t.Helper()
	s.must(os.MkdirAll(filepath.Dir(s.absolute(rel)), 0o755))
	s.must(os.WriteFile(s.absolute(rel), []byte(content), 0o644))
}

func (s *scene) move(from, to string) {
	s.t.Helper()
	s.must(os.Rename(s.absolute(from), s.absolute(to)))
}

func (s *scene) remove(rel string) { s.t.Helper(); s.must(os.RemoveAll(s.absolute(rel))) }

// want compares the reports of all changes so far.
func (s *scene) want(want string) {
	s.t.Helper()
	s.flush()
	if got := s.sink.take(); got != want {
		s.t.Errorf("told %q, want %q", got, want)
	}
}

// never is a time that no test waits for: only Flush causes reports.
const never = time.Hour

// modes runs a test with inotify and with polling.
func modes(t *testing.T, test func(*testing.T, Config)) {
	t.Helper()
	for name, cfg := range map[string]Config{"inotify": {Quiet: never, Latest: never}, "polling": {Quiet: never, Latest: never, Poll: never, Polling: true}} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, cfg) })
	}
}

func TestFiles_ChangesAreReported(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, cfg Config) {
		t.Helper()
		s := watch(t, func(s *scene) { s.write("old/a", "old"); s.write("b", "") }, cfg)
		s.want("")
		s.write("new", "12345")
		s.write("x/y/z/deep.bin", "ab\x00c")
		s.write("late.bin", strings.Repeat("x", 8000)+"\x00")
		s.write("empty", "")
		s.want("+empty 0, +late.bin 8001, +new 5, +x/y/z/deep.bin 4b")
		s.write("new", "123456")
		s.write("x/y/z/deep.bin", "text")
		s.write("x/y/second", "2")
		s.remove("empty")
		s.want("+x/y/second 1, -empty, ~new 6, ~x/y/z/deep.bin 4")
		s.remove("x")
		s.remove("old/a")
		s.want("-old/a, -x/y/second, -x/y/z/deep.bin")
		s.must(os.Chmod(s.absolute("new"), 0o600))
		s.mkdir("folder/alone")
		s.want("")
		// A file that is created and removed at once is not reported; a replaced file has changed.
		s.write("flash", "1")
		s.remove("flash")
		s.write("tmp", "other!")
		s.move("tmp", "new")
		s.want("~new 6")
		s.remove("b")
		s.mkdir("b")
		s.write("b/in", "1")
		s.want("+b/in 1, -b")
	})
}

func TestMoves_AreReportedUnderTheNewPath(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, cfg Config) {
		t.Helper()
		s := watch(t, func(s *scene) { s.write("d/one", "1"); s.write("d/e/two", "2"); s.write("../out/three", "3") }, cfg)
		s.move("d", "moved")
		s.want("+moved/e/two 1, +moved/one 1, -d/e/two, -d/one")
		// Changes in it are reported under its new path.
		s.write("moved/e/two", "22")
		s.write("moved/e/four", "4")
		s.want("+moved/e/four 1, ~moved/e/two 2")
		s.move("moved/one", "one")
		s.want("+one 1, -moved/one")
		s.move("../out", "came")
		s.want("+came/three 1")
		s.write("came/three", "33")
		s.move("moved", "../gone")
		s.want("-moved/e/four, -moved/e/two, ~came/three 2")
		s.write("../gone/e/two", "unseen")
		s.want("")
		// Another folder in its place.
		s.mkdir("moved/e")
		s.move("../gone/e/two", "moved/e/two")
		s.want("+moved/e/two 6")
	})
}

func TestSymlinksAreNotFollowed(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, cfg Config) {
		t.Helper()
		s := watch(t, func(s *scene) { s.write("../out/f", "1"); s.write("in/f", "1"); s.write("will", "1") }, cfg)
		for link, to := range map[string]string{"a": "../out", "b": "../out/f", "c": "in", "d": "nowhere", "e": "."} {
			s.must(os.Symlink(to, s.absolute(link)))
		}
		s.must(syscall.Mkfifo(s.absolute("pipe"), 0o600))
		s.want("")
		s.write("../out/f", "22")
		s.write("in/f", "22")
		s.want("~in/f 2")
		s.remove("will")
		s.must(os.Symlink("in/f", s.absolute("will")))
		s.want("-will")
	})
}

func TestIgnoredFiles_AreNotReported(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, cfg Config) {
		t.Helper()
		s := watch(t, func(s *scene) { s.write(IgnoreFile, "*.log\nout/\n!important.log\n") }, cfg)
		for _, f := range []string{".git/HEAD", "a/node_modules/x/y.js", "__pycache__/m.pyc", ".venv/bin/python", "f.swp", ".spool-put-A", "x.log", "out/f", "a/out/g"} {
			s.write(f, "1")
		}
		s.write("important.log", "1")
		s.write("a/kept", "1")
		s.want("+a/kept 1, +important.log 1")
		// New rules cause no events about the files that they concern.
		s.write(IgnoreFile, "kept\n")
		s.want("~.spoolignore 5")
		s.write("out/h", "1")
		s.write("x.log", "22")
		s.write("a/kept", "22")
		s.want("+out/h 1, ~x.log 2")
		s.write(IgnoreFile, "[\n*.log\n")
		s.want("~.spoolignore 8")
		if got := s.sink.said(); !strings.Contains(got, IgnoreFile) || !strings.Contains(got, "pattern") {
			t.Errorf("of a rule that cannot be read it says %q", got)
		}
		s.write("x.log", "333")
		s.write("a/kept", "333")
		s.want("~a/kept 3")
	})
}

func TestChangesAreJoined(t *testing.T) {
	t.Parallel()
	s := watch(t, nil, Config{Quiet: never, Latest: never})
	for i := range 50 {
		s.write("f", strings.Repeat("x", i))
	}
	s.want("+f 49")
	for i := range 50 {
		s.write("f", strings.Repeat("y", i))
	}
	s.want("~f 49")
}

// waitFor reads reports until they contain the line.
func (s *scene) waitFor(line string) {
	s.t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	var all string
	for !strings.Contains(all, line) {
		select {
		case <-s.sink.news:
			all += s.sink.take() + ", "
		case <-limit.C:
			s.t.Fatalf("told %q, want %q", all, line)
		}
	}
}

func TestQuietFile_IsReported(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]Config{"inotify": {Quiet: 10 * time.Millisecond, Latest: never}, "polling": {Quiet: 10 * time.Millisecond, Latest: never, Poll: time.Millisecond, Polling: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := watch(t, nil, cfg)
			s.write("f", "1")
			s.waitFor("+f 1")
			s.write("f", "22")
			s.waitFor("~f 2")
			s.remove("f")
			s.waitFor("-f")
		})
	}
}

func TestBusyFile_IsReportedAtTheLatest(t *testing.T) {
	t.Parallel()
	s := watch(t, nil, Config{Quiet: never, Latest: 20 * time.Millisecond})
	f, err := os.Create(s.absolute("f"))
	s.must(err)
	defer f.Close()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = f.WriteString("x")
			}
		}
	}()
	s.waitFor("+f ")
	s.waitFor("~f ")
	s.waitFor("~f ")
	close(stop)
	<-stopped
}

func TestFloodIsBounded(t *testing.T) {
	t.Parallel()
	s := watch(t, nil, Config{Quiet: never, Latest: never, PerSecond: 10, PerTurn: 25})
	s.sink.execution = "exe_1"
	fill := func(n int) {
		t.Helper()
		for i := range n {
			s.write(fmt.Sprintf("f%d", i), time.Now().String())
		}
		s.flush()
	}
	fill(100)
	if n := strings.Count(s.sink.take(), "+"); n != 10 {
		t.Errorf("%d events of one second, want 10", n)
	}
	if got := s.sink.said(); strings.Count(got, "only 10 a second and 25 a turn") != 1 || !strings.Contains(got, "not listed: 90 files created, 0 modified, 0 deleted") {
		t.Errorf("said %q", got)
	}
	// The same turn gets one warning, and no more reports than its limit.
	told, counted := 10, 0
	for told+counted < 10+600 {
		fill(100)
		told += strings.Count(s.sink.take(), "~")
		said := s.sink.said()
		if strings.Contains(said, "only 10") {
			t.Error("warned twice")
		}
		var n int
		if _, rest, ok := strings.Cut(said, "not listed: 0 files created, "); ok {
			if _, err := fmt.Sscanf(rest, "%d modified", &n); err != nil {
				t.Fatal(err)
			}
		}
		counted += n
	}
	if told > 25 || told+counted != 610 {
		t.Errorf("%d told and %d counted", told, counted)
	}
	// Another turn has its own limit.
	s.sink.mu.Lock()
	s.sink.execution = "exe_2"
	s.sink.mu.Unlock()
	for told := 0; told < 25; told += strings.Count(s.sink.take(), "~") {
		fill(100)
		if strings.Contains(s.sink.said(), "only 10") && told > 0 {
			t.Error("warned twice")
		}
	}
}

const many = 20_000

// While the sink blocks, the kernel's queue overflows; no file is lost.
func TestOverflow_LosesNoFile(t *testing.T) {
	t.Parallel()
	var log strings.Builder // written by the watcher alone, read after a flush
	gate := make(chan struct{})
	s := watch(t, func(s *scene) {
		s.sink.gate = gate
		for i := range 100 { // the other folders are created later
			s.mkdir(fmt.Sprintf("d%03d/e", i))
		}
	}, Config{
		Quiet: time.Millisecond, Latest: time.Millisecond, PerSecond: many * 3, PerTurn: many * 3, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	for i := range many {
		dir := s.absolute(fmt.Sprintf("d%03d/e", i%200))
		if i < 200 {
			s.must(os.MkdirAll(dir, 0o755))
		}
		s.must(os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o644))
	}
	close(gate)
	s.drain(many, '+')
	for i := range 200 {
		s.remove(fmt.Sprintf("d%03d", i))
	}
	s.drain(many, '-')
	s.want("")
	if !strings.Contains(log.String(), "queue of changes overflowed") {
		t.Error("the queue did not overflow")
	}
}

// drain reads reports until they contain so many different files, each once.
func (s *scene) drain(n int, sign byte) {
	s.t.Helper()
	seen := map[string]bool{}
	limit := time.NewTimer(2 * patience)
	defer limit.Stop()
	for len(seen) < n {
		select {
		case <-s.sink.news:
		case <-limit.C:
			s.t.Fatalf("%d files told, want %d", len(seen), n)
		}
		for line := range strings.SplitSeq(s.sink.take(), ", ") {
			if line == "" {
				continue
			}
			if line[0] != sign || seen[line] {
				s.t.Fatalf("told %q (twice: %v)", line, seen[line])
			}
			seen[line] = true
		}
	}
}

// poor is a changeSource that has few watches.
type poor struct {
	changeSource
	left int
}

func (p *poor) addWatch(dir string) (int, error) {
	if p.left--; p.left < 0 {
		return 0, fmt.Errorf("watch %s: %w", dir, syscall.ENOSPC)
	}
	return p.changeSource.addWatch(dir)
}

func TestFallsBackToPolling(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]int{"at once": 1, "later": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := watch(t, func(s *scene) { s.mkdir("a/b") }, Config{Quiet: never, Latest: never, Poll: time.Millisecond, open: func() (changeSource, error) {
				n, err := newInotifyReader()
				return &poor{n, left}, err
			}})
			s.write("a/b/f", "1")
			s.want("+a/b/f 1")
			for i := range 5 {
				s.write(fmt.Sprintf("new%d/f", i), "1")
			}
			s.want("+new0/f 1, +new1/f 1, +new2/f 1, +new3/f 1, +new4/f 1")
			s.write("a/b/f", "22")
			s.want("~a/b/f 2")
			if got := s.sink.said(); strings.Count(got, "looked at every") != 1 || !strings.Contains(got, "no space left") {
				t.Errorf("said %q", got)
			}
		})
	}
	t.Run("none", func(t *testing.T) {
		t.Parallel()
		s := watch(t, nil, Config{Quiet: never, Latest: never, Poll: never, open: func() (changeSource, error) { return nil, errors.New("no such thing here") }})
		s.write("f", "1")
		s.want("+f 1")
	})
}

func TestTouched_IsCalledAtOnce(t *testing.T) {
	t.Parallel()
	touched := make(chan string, 10)
	s := watch(t, func(s *scene) { s.write("old", strings.Repeat("x", 5000)) }, Config{Quiet: never, Latest: never, Touched: func(path string, before int64) {
		touched <- fmt.Sprint(path, " ", before > 0)
	}})
	s.write("new", "1")
	if got := <-touched; got != "new false" {
		t.Errorf("touched %q", got)
	}
	s.write("old", "1")
	if got := <-touched; got != "old true" {
		t.Errorf("touched %q", got)
	}
}

func TestNew_RefusesInvalidConfig(t *testing.T) {
	t.Parallel()
	for says, cfg := range map[string]Config{
		"absolute": {Dir: "x", Sink: &record{}},
		"missing":  {Dir: "/x"},
		"negative": {Dir: "/x", Sink: &record{}, Quiet: -1},
	} {
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}
