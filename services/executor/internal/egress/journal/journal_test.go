package journal_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a journal whose store runs until stop.
type running struct {
	*journal.Journal
	dir  string
	stop func()
}

func run(t *testing.T, dir string, cfg journal.Config) running {
	t.Helper()
	s := journal.NewStore(cfg)
	j, err := s.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return running{j, dir, stop}
}

// until waits for a line to be on disk.
func (r running) until(t *testing.T, n uint64) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		changed := r.Changed()
		if _, last := r.LineSpan(); last >= n {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			_, last := r.LineSpan()
			t.Fatalf("line %d does not come: the last is %d", n, last)
		}
	}
}

func (r running) lines(t *testing.T, after uint64) (out []api.JournalLine) {
	t.Helper()
	for {
		raw, last, err := r.ReadLines(after)
		if err != nil {
			t.Fatal(err)
		}
		if len(raw) == 0 {
			return out
		}
		after = last
		for line := range bytes.Lines(raw) {
			var l api.JournalLine
			if err := json.Unmarshal(line, &l); err != nil {
				t.Fatal(err)
			}
			out = append(out, l)
		}
		if out[len(out)-1].N != last {
			t.Fatalf("Read says that the last line is %d, and gives %d", last, out[len(out)-1].N)
		}
	}
}

func call(t *testing.T, r running, model string) {
	t.Helper()
	if err := r.AddModelCall(time.Now(), "", events.ModelCalled{Model: model}); err != nil {
		t.Fatal(err)
	}
}

func TestLinesOutliveTheProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := run(t, dir, journal.Config{})
	name := r.Name()
	for _, m := range []string{"a", "b", "c"} {
		call(t, r, m)
	}
	r.stop()
	r = run(t, dir, journal.Config{})
	call(t, r, "d")
	r.until(t, 4)
	got := r.lines(t, 1)
	if len(got) != 3 || r.Name() != name {
		t.Fatalf("%d lines of %s, not 3 of %s", len(got), r.Name(), name)
	}
	for i, want := range []string{"b", "c", "d"} {
		var m events.ModelCalled
		if err := json.Unmarshal(got[i].Data, &m); err != nil || m.Model != want || m.Journal != name || m.Line != uint64(i+2) || got[i].N != uint64(i+2) || got[i].Type != "model_called" {
			t.Errorf("%+v: %+v, %v", got[i], m, err)
		}
	}
}

// A reader gets a line only after the line is in the file.
func TestLines_AreReadAfterTheyAreOnDisk(t *testing.T) {
	t.Parallel()
	s := journal.NewStore(journal.Config{}) // the store does not run, so it writes nothing
	dir := t.TempDir()
	j, err := s.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.AddModelCall(time.Now(), "", events.ModelCalled{}); err != nil {
		t.Fatal(err)
	}
	if raw, _, err := j.ReadLines(0); len(raw) > 0 || err != nil {
		t.Errorf("%q, %v", raw, err)
	}
	if err := j.AckLines(1); err == nil {
		t.Error("a line that nobody saw is acknowledged")
	}
}

func TestDamage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		harm func([]byte) []byte
		last uint64 // the last line in the file
		same bool   // the journal keeps its name
	}{
		{"a torn last line", func(b []byte) []byte { return append(b, `{"n":4,"ty`...) }, 3, true},
		{"a last line without its end", func(b []byte) []byte { return b[:len(b)-1] }, 2, true},
		{"a line in the middle", func(b []byte) []byte { return append([]byte("xx"), b[2:]...) }, 0, false},
		{"a line is missing", func(b []byte) []byte { return b[bytes.IndexByte(b, '\n')+1:] }, 0, false},
		{"lines twice", func(b []byte) []byte { return append(b, b...) }, 0, false},
		{"zeros at the end, after a power cut", func(b []byte) []byte { return append(b, make([]byte, 100)...) }, 3, true},
		{"nothing", func([]byte) []byte { return nil }, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			r := run(t, dir, journal.Config{})
			name := r.Name()
			for range 3 {
				call(t, r, "m")
			}
			r.stop()
			path := filepath.Join(dir, "journal.jsonl")
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, c.harm(raw), 0o600); err != nil {
				t.Fatal(err)
			}
			r = run(t, dir, journal.Config{})
			if _, last := r.LineSpan(); last != c.last || (r.Name() == name) != c.same {
				t.Fatalf("the last line is %d, the name is the same: %v", last, r.Name() == name)
			}
			call(t, r, "next")
			r.until(t, c.last+1)
			if got := r.lines(t, 0); uint64(len(got)) != c.last+1 {
				t.Errorf("%d lines", len(got))
			}
		})
	}
}

func TestAck_RemovesLines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := run(t, dir, journal.Config{})
	const n = 400
	for range n {
		call(t, r, strings.Repeat("m", 500))
	}
	r.until(t, n)
	size := func() int64 {
		info, err := os.Stat(filepath.Join(dir, "journal.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	before := size()
	var ahead *journal.AheadError
	if err := r.AckLines(n + 1); !errors.As(err, &ahead) {
		t.Errorf("ahead: %v", err)
	}
	for _, upTo := range []uint64{1, 300, 200, 300} {
		if err := r.AckLines(upTo); err != nil {
			t.Fatal(err)
		}
	}
	if size() > before/2 {
		t.Errorf("the file has %d of %d bytes after three quarters are acknowledged", size(), before)
	}
	check := func() {
		t.Helper()
		if got := r.lines(t, 0); len(got) != n-300 || got[0].N != 301 {
			t.Errorf("%d lines from %d", len(got), got[0].N)
		}
		if first, last := r.LineSpan(); first != 301 || last != n {
			t.Errorf("%d to %d", first, last)
		}
	}
	check()
	r.stop()
	r = run(t, dir, journal.Config{})
	check()
	if err := r.AckLines(n); err != nil {
		t.Fatal(err)
	}
	call(t, r, "next")
	r.until(t, n+1)
	if got := r.lines(t, n); len(got) != 1 || got[0].N != n+1 {
		t.Errorf("%+v", got)
	}
}

// The head is written before the file is truncated, so a kill between the two loses no line and repeats none.
func TestTrim_SurvivesAKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := run(t, dir, journal.Config{})
	for range 3 {
		call(t, r, "m")
	}
	r.until(t, 3)
	r.stop()
	head := `{"journal":"` + r.Name() + `","base":2}`
	if err := os.WriteFile(filepath.Join(dir, "journal.json"), []byte(head), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time the file is shorter
		r = run(t, dir, journal.Config{})
		if got := r.lines(t, 0); len(got) != 1 || got[0].N != 3 {
			t.Fatalf("%+v", got)
		}
		r.stop()
	}
}

func denial(host string) events.EgressDenied {
	return events.EgressDenied{Host: host, Code: "NOT_ALLOWED", Message: "no"}
}

// counts returns the number of denials that the lines count together.
func counts(t *testing.T, lines []api.JournalLine) (sum uint32) {
	t.Helper()
	for _, l := range lines {
		var d events.EgressDenied
		if err := json.Unmarshal(l.Data, &d); err != nil || d.Line != l.N || d.Count == 0 {
			t.Errorf("%+v: %v", l, err)
		}
		sum += d.Count
	}
	return sum
}

func TestDenials_EqualOnesShareALine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := run(t, dir, journal.Config{})
		for range 1000 {
			if err := r.RecordDenial(time.Now(), journal.Owner{}, denial("evil.example")); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond)
		if got := r.lines(t, 0); len(got) != 1 || counts(t, got) != 1 {
			t.Errorf("at once: %d lines", len(got))
		}
		time.Sleep(2 * time.Second)
		if got := r.lines(t, 0); len(got) != 2 || counts(t, got) != 1000 {
			t.Errorf("after a second: %d lines for %d", len(got), counts(t, got))
		}
		time.Sleep(time.Minute)
		if got := r.lines(t, 2); len(got) != 0 {
			t.Errorf("later: %d more lines", len(got))
		}
		if err := r.RecordDenial(time.Now(), journal.Owner{}, denial("evil.example")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		if got := r.lines(t, 2); len(got) != 1 {
			t.Errorf("the next one: %d lines", len(got))
		}
		r.stop()
	})
}

// The denials of a sandbox that requests a different host each time are written as ten lines per second, and each
// denial is counted.
func TestDenials_AreBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := run(t, dir, journal.Config{})
		const seconds, each = 20, 500
		for s := range seconds {
			for i := range each {
				if err := r.RecordDenial(time.Now(), journal.Owner{}, denial(strings.Repeat("x", s+1)+strings.Repeat("y", i+1))); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(time.Second)
		}
		time.Sleep(5 * time.Second)
		last := r.FlushDenials()
		r.until(t, last)
		got := r.lines(t, 0)
		if len(got) > 50+11*(seconds+5) {
			t.Errorf("%d lines in %d seconds", len(got), seconds)
		}
		if sum := counts(t, got); sum != seconds*each {
			t.Errorf("they stand for %d denials, not %d", sum, seconds*each)
		}
		r.stop()
	})
}

func TestFull(t *testing.T) {
	t.Parallel()
	r := run(t, t.TempDir(), journal.Config{MaxBytes: 10_000})
	n := uint64(0)
	for !r.IsFull() {
		call(t, r, strings.Repeat("m", 200))
		if n++; n > 1000 {
			t.Fatal("it is never full")
		}
	}
	for range 20 { // the waiting lines leave no room for denials, which are still counted
		if err := r.RecordDenial(time.Now(), journal.Owner{}, denial("evil.example")); err != nil {
			t.Fatal(err)
		}
	}
	r.until(t, n)
	if err := r.AckLines(n); err != nil {
		t.Fatal(err)
	}
	if r.IsFull() {
		t.Error("it is full although all is acknowledged")
	}
	r.until(t, r.FlushDenials())
	if got := r.lines(t, n); counts(t, got) != 20 {
		t.Errorf("%d denials", counts(t, got))
	}
}
