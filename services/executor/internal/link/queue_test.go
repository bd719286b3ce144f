package link

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/spoolhq/spool/pkg/runner"
)

func TestLineReader_CutsLongLines(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	long := strings.Repeat("x", limit+1)
	in := "one\n\ntwo\r\n" + long + "\n" + strings.Repeat("y", limit) + "\nlast"
	for name, r := range map[string]io.Reader{"at once": strings.NewReader(in), "by the byte": iotest.OneByteReader(strings.NewReader(in))} {
		lines := newLineReader(r, limit, initialBufferBytes)
		for i, want := range []struct {
			text string
			cut  bool
			err  error
		}{{"one", false, nil}, {"", false, nil}, {"two", false, nil}, {long[:limit], true, nil}, {strings.Repeat("y", limit), false, nil}, {"last", false, io.EOF}} {
			got, cut, err := lines.readLine()
			if string(got) != want.text || cut != want.cut || !errors.Is(err, want.err) {
				t.Errorf("%s: line %d has %d bytes (%.20q), cut %v, %v", name, i, len(got), got, cut, err)
			}
		}
	}
}

// TestLineReader_SplitsAnyStream: lines of any length come out whole or cut, however the stream is divided into reads.
func TestLineReader_SplitsAnyStream(t *testing.T) {
	t.Parallel()
	const limit = 3 * maxKeptBufferBytes
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var stream bytes.Buffer
		var want []string
		for range 1 + random.IntN(12) {
			n := random.IntN(200)
			switch random.IntN(4) {
			case 0:
				n = limit - 2 + random.IntN(5)
			case 1:
				n = random.IntN(2 * limit)
			}
			text := strings.Repeat(string(rune('a'+len(want))), n)
			stream.WriteString(text + "\n")
			want = append(want, text)
		}
		var r io.Reader = &stream
		if seed%2 == 0 {
			r = &randomReads{&stream, random}
		}
		lines := newLineReader(r, limit, initialBufferBytes)
		for i, text := range want {
			got, cut, err := lines.readLine()
			if err != nil || cut != (len(text) > limit) || string(got) != text[:min(len(text), limit)] {
				t.Fatalf("seed %d: line %d of %d bytes has %d, cut %v, %v", seed, i, len(text), len(got), cut, err)
			}
		}
		if got, cut, err := lines.readLine(); len(got) > 0 || cut || !errors.Is(err, io.EOF) {
			t.Fatalf("seed %d: after the end: %d bytes, %v, %v", seed, len(got), cut, err)
		}
	}
}

// randomReads returns a random number of bytes at each read, sometimes none.
type randomReads struct {
	r      io.Reader
	random *rand.Rand
}

func (r *randomReads) Read(p []byte) (int, error) {
	if r.random.IntN(8) == 0 {
		return 0, nil
	}
	return r.r.Read(p[:1+r.random.IntN(len(p))])
}

// TestLineReader_KeepsASmallBuffer: a reader that waits for a line holds little memory, also after a long line.
func TestLineReader_KeepsASmallBuffer(t *testing.T) {
	const readers = 100
	line := strings.Repeat("x", 300) + "\n"
	in := line + strings.Repeat("y", 1<<20) + "\n" + line
	var list []*lineReader
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range readers {
		l := newLineReader(&oneLine{rest: in}, runner.MaxLineLength, initialBufferBytes)
		for range 3 {
			if _, _, err := l.readLine(); err != nil {
				t.Fatal(err)
			}
		}
		list = append(list, l)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n := int64(after.HeapAlloc) - int64(before.HeapAlloc); n > readers*(maxKeptBufferBytes+2<<10) {
		t.Errorf("%d readers hold %d bytes", readers, n)
	}
	runtime.KeepAlive(list)
}

// oneLine returns at most one line at each read.
type oneLine struct{ rest string }

func (o *oneLine) Read(p []byte) (int, error) {
	i := strings.IndexByte(o.rest, '\n') + 1
	if i == 0 {
		return 0, io.EOF
	}
	n := copy(p, o.rest[:i])
	o.rest = o.rest[n:]
	return n, nil
}

// BenchmarkLineReader reads 16 MB in lines of one length.
func BenchmarkLineReader(b *testing.B) {
	for name, length := range map[string]int{"300B": 300, "64KiB": 64 << 10, "1MiB": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			in := strings.Repeat(strings.Repeat("x", length-1)+"\n", 16<<20/length)
			b.ReportAllocs()
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				lines := newLineReader(strings.NewReader(in), runner.MaxLineLength, initialBufferBytes)
				for {
					if _, _, err := lines.readLine(); err != nil {
						break
					}
				}
			}
		})
	}
}

// A full queue blocks the reader, until there is room or the queue is closed.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newItemQueue()
		pushed := make(chan bool, 8)
		push := func(n uint64) {
			go func() { pushed <- q.push(JournalItem{Line: &runner.JournalLine{N: n}}, queueBytes/2) }()
			synctest.Wait()
		}
		for n := range uint64(3) {
			push(n)
		}
		if len(pushed) != 2 {
			t.Errorf("%d of 3 went in", len(pushed))
		}
		it, ok := q.pop()
		if !ok || it.Line.N != 0 {
			t.Errorf("popped %+v, %v", it, ok)
		}
		synctest.Wait()
		if len(pushed) != 3 {
			t.Error("the third did not go in when there was room")
		}
		push(3)
		q.close()
		synctest.Wait()
		for i, want := range []bool{true, true, true, false} {
			if got := <-pushed; got != want {
				t.Errorf("push %d: %v", i, got)
			}
		}
		for _, want := range []uint64{1, 2} {
			if it, ok := q.pop(); !ok || it.Line.N != want {
				t.Errorf("after the close: %+v, %v, want %d", it, ok, want)
			}
		}
		if _, ok := q.pop(); ok {
			t.Error("popped from an empty queue")
		}
	})
}
