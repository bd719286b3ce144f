package journal_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func open(t interface{ Fatal(...any) }, limit int) *journal.Journal {
	j, err := journal.New(time.Unix(1, 0), strings.NewReader(strings.Repeat("x", 10)), limit)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func line(text string) runner.JournalLine {
	return runner.JournalLine{Type: "log", Data: json.RawMessage(fmt.Sprintf("%q", text))}
}

func numbers(t interface{ Fatal(...any) }, raw [][]byte) (out []uint64) {
	for _, r := range raw {
		var l runner.JournalLine
		if err := json.Unmarshal(r, &l); err != nil {
			t.Fatal(err)
		}
		out = append(out, l.N)
	}
	return out
}

func TestNew_NamesTheJournal(t *testing.T) {
	t.Parallel()
	if err := events.CheckID("journal", events.KindJournal, open(t, 0).Name()); err != nil {
		t.Error(err)
	}
	if _, err := journal.New(time.Unix(1, 0), strings.NewReader("xxxxxxxxxx"), -1); err == nil {
		t.Error("a negative limit was accepted")
	}
}

// For any sequence of Append, LinesAfter and TrimUpTo, every number is returned once and in order, and only acknowledged lines
// are removed.
func TestFollowAndTrim(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		j := open(rt, 0)
		var appended, acked uint64
		rt.Repeat(map[string]func(*rapid.T){
			"append": func(*rapid.T) { appended++; j.Append(t.Context(), line("x")) },
			"trim": func(rt *rapid.T) {
				n := rapid.Uint64Range(0, appended+2).Draw(rt, "ack")
				j.TrimUpTo(n)
				acked = max(acked, min(n, appended))
			},
			"read": func(rt *rapid.T) {
				after := rapid.Uint64Range(0, appended+2).Draw(rt, "after")
				raw, changed := j.LinesAfter(after, rapid.IntRange(1, 500).Draw(rt, "max"))
				next := max(after, acked) + 1
				if (len(raw) == 0) != (next > appended) || (len(raw) == 0) != (changed != nil) {
					rt.Fatalf("after %d of %d, acked %d: %d lines", after, appended, acked, len(raw))
				}
				for _, n := range numbers(rt, raw) {
					if n != next {
						rt.Fatalf("got %d, want %d", n, next)
					}
					next++
				}
			},
			"": func(rt *rapid.T) {
				if first, last := j.LineRange(); first != acked+1 || last != appended {
					rt.Fatalf("bounds %d %d, want %d %d", first, last, acked+1, appended)
				}
			},
		})
	})
}

func TestAppendWaitsWhileFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, 1000)
		n := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ; n < 100; n++ {
				j.Append(t.Context(), line("0123456789"))
			}
		}()
		synctest.Wait()
		if n == 0 || n > 20 {
			t.Fatalf("%d lines went into 1000 bytes", n)
		}
		for acked := uint64(0); ; {
			raw, _ := j.LinesAfter(acked, 1<<20)
			if len(raw) == 0 {
				break
			}
			acked += uint64(len(raw))
			j.TrimUpTo(acked)
			synctest.Wait()
		}
		<-done
		if _, last := j.LineRange(); last != 100 {
			t.Fatalf("last %d, want 100", last)
		}
	})
}

func TestAppendGoesOnWhenItsWaitIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, 1)
		j.Append(t.Context(), line("first"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		j.Append(ctx, line("second"))
		if _, last := j.LineRange(); last != 2 {
			t.Fatalf("last %d: a line was lost", last)
		}
	})
}
