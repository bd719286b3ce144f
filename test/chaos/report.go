package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/chaos/check"
)

const (
	// endLines is the number of lines that are kept from the end of a process's log, each of at most lineBytes.
	endLines  = 3
	lineBytes = 300
	// causeWithin is the maximum time between a fault and the end of a process for which the fault is reported as the possible
	// cause.
	causeWithin = 30 * time.Second
	clockFormat = "15:04:05.000"
)

// unexpectedEnd is the end of a process that no fault has killed.
type unexpectedEnd struct {
	part   string
	at     time.Time
	lived  time.Duration
	status string
	lines  []string // the last lines of its log
}

// injectedFault is a fault with the time and the process at which it was injected.
type injectedFault struct {
	at   time.Time
	part string
	fault
}

func (f injectedFault) String() string {
	if f.freeze {
		return fmt.Sprintf("freeze of %s for %s", f.part, f.length)
	}
	return fmt.Sprintf("kill of %s for %s", f.part, f.length)
}

// lastLines returns the last lines of a log file after an offset.
func lastLines(path string, from int64) []string {
	f, err := os.Open(path)
	if err != nil {
		return []string{err.Error()}
	}
	defer f.Close() //nolint:errcheck // the file is only read
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		from = max(from, size-endLines*16*lineBytes)
	}
	raw, err := io.ReadAll(io.NewSectionReader(f, from, 1<<20))
	if err != nil {
		return []string{err.Error()}
	}
	lines := strings.Split(strings.TrimRight(string(raw), "\n"), "\n")
	lines = lines[max(0, len(lines)-endLines):]
	for i, line := range lines {
		lines[i] = line[:min(len(line), lineBytes)]
	}
	return lines
}

// causes returns the faults shortly before an end that hit the process itself or a server that it needs, the latest
// first.
func causes(e unexpectedEnd, faults []injectedFault) (list []string) {
	for _, f := range slices.Backward(faults) {
		if before := e.at.Sub(f.at); before >= 0 && before <= causeWithin && (f.part == e.part || f.part == "nats" || f.part == "postgres") {
			list = append(list, fmt.Sprintf("%s (%.1f s before)", f, before.Seconds()))
		}
	}
	return list
}

var digitRuns = regexp.MustCompile(`[0-9]+`)

// writeTerminalEvents writes each end with its status and the faults before it. Log lines that differ from earlier ones only in
// numbers are written once.
func writeTerminalEvents(w io.Writer, ends []unexpectedEnd, faults []injectedFault) {
	count := map[string]int{}
	for _, e := range ends {
		count[e.part]++
	}
	var parts []string
	for _, part := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprintf("%s %d", part, count[part]))
	}
	fmt.Fprintf(w, "ends of processes that were not injected (each was started again): %d %v\n", len(ends), parts)
	written := map[string]bool{}
	for _, e := range slices.SortedFunc(slices.Values(ends), func(a, b unexpectedEnd) int { return a.at.Compare(b.at) }) {
		fmt.Fprintf(w, "  %s %s: %s, %.1f s after its start\n", e.at.Format(clockFormat), e.part, e.status, e.lived.Seconds())
		after := causes(e, faults)
		if len(after) == 0 {
			after = []string{fmt.Sprintf("no fault of it, NATS or Postgres within %s", causeWithin)}
		}
		fmt.Fprintf(w, "    after: %s\n", strings.Join(after, ", "))
		kind := digitRuns.ReplaceAllString(e.part+strings.Join(e.lines[max(0, len(e.lines)-1):], ""), "0")
		if written[kind] {
			fmt.Fprintln(w, "    log: as above")
			continue
		}
		written[kind] = true
		for _, line := range e.lines {
			fmt.Fprintf(w, "    log: %s\n", line)
		}
	}
}

// ends returns the ends of all processes that no fault caused.
func (c *cluster) ends() (list []unexpectedEnd) {
	for _, p := range c.parts {
		p.mu.Lock()
		list = append(list, p.ends...)
		p.mu.Unlock()
	}
	return list
}

// report prints the numbers of a run of the chaos test.
func (d *driver) report(c *cluster, s settings, e check.Evidence, faulty time.Duration) {
	total, connections, kills, pieces, seen := 0, 0, 0, 0, map[string]bool{}
	for _, list := range e.Log {
		total += len(list)
	}
	for _, cl := range d.clients {
		connections += cl.connections
		pieces += len(cl.pieces)
		for _, p := range cl.pieces {
			seen[p.Block] = true
		}
	}
	for _, f := range c.faults {
		if !f.freeze {
			kills++
		}
	}
	fmt.Printf("seed %d: %d faults (%d kills, %d freezes) in %s\n", s.seed, len(c.faults), kills, len(c.faults)-kills, faulty.Round(time.Second))
	fmt.Printf("%d sessions, %d queries, %d events; %d clients over %d connections; %d requests repeated\n", len(e.Log), len(e.Accepted), total, len(d.clients), connections, d.retries)
	fmt.Printf("%d more sessions were deleted meanwhile, and erased\n", d.deleted)
	fmt.Printf("clients received %d pieces of text in flight, of %d blocks\n", pieces, len(seen))
	fmt.Printf("longest time without an event for any client while a query was open: %s\n", d.stall.Round(10*time.Millisecond))
}
