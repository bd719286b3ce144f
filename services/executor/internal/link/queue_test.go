package link

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/spoolhq/spool/pkg/runner"
)

func TestLines(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	long := strings.Repeat("x", limit+1)
	in := "one\n\ntwo\r\n" + long + "\n" + strings.Repeat("y", limit) + "\nlast"
	for name, r := range map[string]io.Reader{"at once": strings.NewReader(in), "by the byte": iotest.OneByteReader(strings.NewReader(in))} {
		lines := newLineReader(r, limit)
		for i, want := range []struct {
			text string
			cut  bool
			err  error
		}{{"one", false, nil}, {"", false, nil}, {"two", false, nil}, {long[:limit], true, nil}, {strings.Repeat("y", limit), false, nil}, {"last", false, io.EOF}} {
			got, cut, err := lines.next()
			if string(got) != want.text || cut != want.cut || !errors.Is(err, want.err) {
				t.Errorf("%s: line %d has %d bytes (%.20q), cut %v, %v", name, i, len(got), got, cut, err)
			}
		}
	}
}

// A full queue blocks the reader, until there is room or the queue is closed.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newQueue()
		pushed := make(chan bool, 8)
		push := func(n uint64) {
			go func() { pushed <- q.push(Item{Line: &runner.Line{N: n}}, queueBytes/2) }()
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
