package journal

import (
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Bounds of what denials may write, of each journal.
const (
	foldFor    = time.Second // denials alike within it become one line
	foldMost   = 256         // different ones that are told apart within it
	linesEach  = 10          // lines a second, lasting
	linesBurst = 50          // lines at once
)

// Denial is a line of a denial, for whoever logs it.
type Denial struct {
	Who
	Data events.EgressDenied
}

// Who is whose a denial is.
type Who struct{ Sandbox, Tenant, Session, Execution string }

// alike is what makes two denials the same.
type alike struct {
	who                         Who
	host, method, address, code string
	port                        uint32
}

// window counts denials alike after the first, which has its line.
type window struct {
	ends time.Time
	more uint32
	data events.EgressDenied
}

// folds is what a journal knows of the last second's denials.
type folds struct {
	open     map[alike]*window
	tokens   float64
	filled   time.Time
	over     uint32 // denials that no line stands for yet, beyond the rate
	overData events.EgressDenied
	overWho  Who
}

// Denied adds a line for a denial, or counts it to one that is to come: those
// alike within a second share a line, and beyond ten lines a second so do all others.
func (j *Journal) Denied(at time.Time, who Who, d events.EgressDenied) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	f := &j.folds
	key := alike{who: who, host: d.Host, method: d.Method, address: d.Address, code: d.Code, port: d.Port}
	if w := f.open[key]; w != nil {
		w.more = saturate(w.more, 1)
		return nil
	}
	j.store.folds(j)
	if len(f.open) >= foldMost || !j.mayDeny(at) {
		f.over, f.overData, f.overWho = saturate(f.over, 1), d, who
		return nil
	}
	if f.open == nil {
		f.open = map[alike]*window{}
	}
	f.open[key] = &window{ends: at.Add(foldFor), data: d}
	d.Count = 1
	return j.deny(at, who, d)
}

// mayDeny takes from the rate, and looks at how much waits already; with j.mu held.
func (j *Journal) mayDeny(at time.Time) bool {
	f := &j.folds
	if f.filled.IsZero() {
		f.tokens = linesBurst
	} else {
		f.tokens = math.Min(linesBurst, f.tokens+max(at.Sub(f.filled), 0).Seconds()*linesEach)
	}
	f.filled = at
	if f.tokens < 1 || j.size() > j.store.maxBytes/2 {
		return false
	}
	f.tokens--
	return true
}

// deny adds the line, with j.mu held.
func (j *Journal) deny(at time.Time, who Who, d events.EgressDenied) error {
	d.Journal, d.Line = j.head.Journal, j.last+1
	if err := j.add(at, who.Execution, d); err != nil {
		return err
	}
	j.store.denied(Denial{Who: who, Data: d})
	return nil
}

// fold adds the lines of windows that are over, or of all.
func (j *Journal) fold(now time.Time, all bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f := &j.folds
	for key, w := range f.open {
		if !all && now.Before(w.ends) {
			continue
		}
		if w.more == 0 {
			delete(f.open, key)
			continue
		}
		if !all && !j.mayDeny(now) {
			f.over, f.overData, f.overWho = saturate(f.over, w.more), w.data, key.who
			delete(f.open, key)
			continue
		}
		d := w.data
		d.Count = w.more
		w.more, w.ends = 0, now.Add(foldFor)
		if err := j.deny(now, key.who, d); err != nil {
			j.store.log.Error("a denial is not journaled", "error", err)
		}
	}
	if f.over > 0 && (all || j.mayDeny(now)) {
		d := f.overData
		d.Count, f.over = f.over, 0
		d.Message = fmt.Sprintf("Too many were denied to list each; this stands for %d, and the last of them was: %s", d.Count, d.Message)
		if err := j.deny(now, f.overWho, d); err != nil {
			j.store.log.Error("a denial is not journaled", "error", err)
		}
	}
	if len(f.open) == 0 && f.over == 0 {
		j.store.folded(j)
	}
}

// Settle adds the lines of all denials that are only counted so far, and gives
// the number of the last line, which Changed tells to be on disk.
func (j *Journal) Settle() uint64 {
	j.fold(time.Now(), true)
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

func saturate(a, b uint32) uint32 {
	if a > math.MaxUint32-b {
		return math.MaxUint32
	}
	return a + b
}
