package journal

import (
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Limits of the lines that denials add to a journal.
const (
	denialCountTime      = time.Second // equal denials within it are counted in one line
	maxDenialCounters    = 256         // different denials that are counted within it
	denialLinesPerSecond = 10
	denialLinesBurst     = 50
)

// Denial is a refused connection or request of a sandbox, or several equal ones, as the proxy logs it.
type Denial struct {
	Owner
	Data events.EgressDenied
}

// Owner identifies a sandbox with its tenant, session and execution.
type Owner struct{ Sandbox, Tenant, Session, Execution string }

// denialKey has the fields in which two denials must agree to be counted as equal.
type denialKey struct {
	owner                       Owner
	host, method, address, code string
	port                        uint32
}

// denialCounter counts for a short time the denials that are equal to a denial in the journal.
type denialCounter struct {
	ends time.Time
	more uint32
	data events.EgressDenied
}

// denialLimiter limits how many lines a sandbox's denials add to its journal. It counts the denials that get no line of their own.
type denialLimiter struct {
	windows map[denialKey]*denialCounter
	tokens  float64 // of the rate limit
	filled  time.Time

	excess      uint32 // denials beyond the rate, which have no line yet
	excessData  events.EgressDenied
	excessOwner Owner
}

// RecordDenial adds a line for a denial to the journal, or only counts the denial: equal denials within a second share one line,
// and all denials beyond ten lines a second share another one.
func (j *Journal) RecordDenial(at time.Time, owner Owner, d events.EgressDenied) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := &j.denials
	key := denialKey{owner: owner, host: d.Host, method: d.Method, address: d.Address, code: d.Code, port: d.Port}
	if w := n.windows[key]; w != nil {
		w.more = addSaturating(w.more, 1)
		return nil
	}
	j.store.markCounting(j)
	if len(n.windows) >= maxDenialCounters || !j.takeLineToken(at) {
		n.excess, n.excessData, n.excessOwner = addSaturating(n.excess, 1), d, owner
		return nil
	}
	if n.windows == nil {
		n.windows = map[denialKey]*denialCounter{}
	}
	n.windows[key] = &denialCounter{ends: at.Add(denialCountTime), data: d}
	d.Count = 1
	return j.addDenial(at, owner, d)
}

// takeLineToken takes a token of the rate limit for lines about denials. It returns false if there is none, or if unacknowledged
// lines already use half of the journal's limit. The caller holds j.mu.
func (j *Journal) takeLineToken(at time.Time) bool {
	n := &j.denials
	if n.filled.IsZero() {
		n.tokens = denialLinesBurst
	} else {
		n.tokens = math.Min(denialLinesBurst, n.tokens+max(at.Sub(n.filled), 0).Seconds()*denialLinesPerSecond)
	}
	n.filled = at
	if n.tokens < 1 || j.unacknowledgedBytes() > j.store.maxBytes/2 {
		return false
	}
	n.tokens--
	return true
}

// addDenial adds a line about a denial to the journal. The caller holds j.mu.
func (j *Journal) addDenial(at time.Time, owner Owner, d events.EgressDenied) error {
	d.Journal, d.Line = j.head.Journal, j.last+1
	if err := j.addLine(at, owner.Execution, d); err != nil {
		return err
	}
	j.store.denied(Denial{Owner: owner, Data: d})
	return nil
}

// addCountedDenials adds lines about the counted denials whose time window has ended, or about all counted denials if all is true.
func (j *Journal) addCountedDenials(now time.Time, all bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := &j.denials
	for key, w := range n.windows {
		if !all && now.Before(w.ends) {
			continue
		}
		if w.more == 0 {
			delete(n.windows, key)
			continue
		}
		if !all && !j.takeLineToken(now) {
			n.excess, n.excessData, n.excessOwner = addSaturating(n.excess, w.more), w.data, key.owner
			delete(n.windows, key)
			continue
		}
		d := w.data
		d.Count = w.more
		w.more, w.ends = 0, now.Add(denialCountTime)
		if err := j.addDenial(now, key.owner, d); err != nil {
			j.store.log.Error("a denial is not journaled", "error", err)
		}
	}
	if n.excess > 0 && (all || j.takeLineToken(now)) {
		d := n.excessData
		d.Count, n.excess = n.excess, 0
		d.Message = fmt.Sprintf("Too many were denied to list each; this stands for %d, and the last of them was: %s", d.Count, d.Message)
		if err := j.addDenial(now, n.excessOwner, d); err != nil {
			j.store.log.Error("a denial is not journaled", "error", err)
		}
	}
	if len(n.windows) == 0 && n.excess == 0 {
		j.store.unmarkCounting(j)
	}
}

// FlushDenials adds lines about all denials that were counted so far, and returns the number of the last line. LineSpan reports
// when the line is on disk, and Changed signals that.
func (j *Journal) FlushDenials() uint64 {
	j.addCountedDenials(time.Now(), true)
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

func addSaturating(a, b uint32) uint32 {
	if a > math.MaxUint32-b {
		return math.MaxUint32
	}
	return a + b
}
