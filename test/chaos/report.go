package main

import (
	"errors"
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
	// keptLogLines is the number of lines that are kept from the end of a process's log.
	keptLogLines = 3
	// maxLogLineBytes is the maximum length, in bytes, of the lines that are kept from the end of a process's log; the
	// rest of a line is cut off.
	maxLogLineBytes = 300
	// maxCauseAge is the maximum time from a fault to the end of a process for which the report names the fault as a
	// possible cause.
	maxCauseAge = 30 * time.Second
	// clockFormat is the format of the times that the chaos test prints.
	clockFormat = "15:04:05.000"
)

// unexpectedEnd is the end of a process of the installation that no fault has killed.
type unexpectedEnd struct {
	part   string
	at     time.Time
	lived  time.Duration
	status string
	lines  []string // the last lines of its log
}

// injectedFault is a fault, the time at which it was injected, and the processes that it hit.
type injectedFault struct {
	at    time.Time
	parts []string
	plannedFault
}

func (f injectedFault) String() string {
	switch f.kind {
	case faultStalledStart:
		return fmt.Sprintf("freeze of nats for %s, %s after a new %s connected", f.length, f.delay, f.parts[0])
	case faultFreeze, faultFrozenSessions:
		return fmt.Sprintf("freeze of %s for %s", strings.Join(f.parts, ", "), f.length)
	}
	return fmt.Sprintf("kill of %s for %s", f.parts[0], f.length)
}

// hits reports whether the fault hit the process part.
func (f injectedFault) hits(part string) bool { return slices.Contains(f.parts, part) }

// lastLines returns the last lines of a log file, of those after the offset from.
func lastLines(path string, from int64) []string {
	f, err := os.Open(path)
	if err != nil {
		return []string{err.Error()}
	}
	defer f.Close() //nolint:errcheck // the file is only read
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		from = max(from, size-keptLogLines*16*maxLogLineBytes)
	}
	raw, err := io.ReadAll(io.NewSectionReader(f, from, 1<<20))
	if err != nil {
		return []string{err.Error()}
	}
	lines := strings.Split(strings.TrimRight(string(raw), "\n"), "\n")
	lines = lines[max(0, len(lines)-keptLogLines):]
	for i, line := range lines {
		lines[i] = line[:min(len(line), maxLogLineBytes)]
	}
	return lines
}

// possibleCauses describes the faults shortly before the end e that hit the ended process itself, NATS or Postgres, the
// latest first.
func possibleCauses(e unexpectedEnd, faults []injectedFault) (list []string) {
	for _, f := range slices.Backward(faults) {
		if before := e.at.Sub(f.at); before >= 0 && before <= maxCauseAge && (f.hits(e.part) || f.hits("nats") || f.hits("postgres")) {
			list = append(list, fmt.Sprintf("%s (%.1f s before)", f, before.Seconds()))
		}
	}
	return list
}

// unexplainedEnds returns an error that names the processes that ended although no fault explains it; nil if there are
// none. NATS and the services wait while others are frozen or down, so nothing explains an end of theirs. A Postgres
// refuses to start while processes of a killed one exist.
func unexplainedEnds(ends []unexpectedEnd, faults []injectedFault) error {
	var errs []error
	for _, e := range ends {
		explained := e.part == "postgres" && slices.ContainsFunc(faults, func(f injectedFault) bool {
			before := e.at.Sub(f.at)
			return f.kind == faultKill && f.hits(e.part) && before >= 0 && before <= maxCauseAge
		})
		if !explained {
			errs = append(errs, fmt.Errorf("%s ended at %s although no fault explains it: %s", e.part, e.at.Format(clockFormat), e.status))
		}
	}
	return errors.Join(errs...)
}

// digitsPattern matches each number in a log line.
var digitsPattern = regexp.MustCompile(`[0-9]+`)

// writeUnexpectedEnds prints the ends of processes that no fault caused, each with its status and the faults before it.
// It prints log lines that differ only in numbers once.
func writeUnexpectedEnds(w io.Writer, ends []unexpectedEnd, faults []injectedFault) {
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
		after := possibleCauses(e, faults)
		if len(after) == 0 {
			after = []string{fmt.Sprintf("no fault of it, NATS or Postgres within %s", maxCauseAge)}
		}
		fmt.Fprintf(w, "    after: %s\n", strings.Join(after, ", "))
		kind := digitsPattern.ReplaceAllString(e.part+strings.Join(e.lines[max(0, len(e.lines)-1):], ""), "0")
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

// unexpectedEnds returns the ends of all processes that no fault caused.
func (c *cluster) unexpectedEnds() (list []unexpectedEnd) {
	for _, p := range c.allProcesses() {
		p.mu.Lock()
		list = append(list, p.ends...)
		p.mu.Unlock()
	}
	return list
}

// printReport prints the counts of a run of the chaos test: faults, sessions, queries, events and connections. faulty
// is the time in which faults were injected.
func (d *clientDriver) printReport(c *cluster, s settings, e check.Observations, faulty time.Duration) {
	total, connections, pieces, seen := 0, 0, 0, map[string]bool{}
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
	kinds := map[faultKind]int{}
	for _, f := range c.faults {
		kinds[f.kind]++
	}
	fmt.Printf("seed %d: %d faults (%d kills, %d freezes, %d starts while NATS is frozen, %d freezes of all session services) in %s\n", s.seed,
		len(c.faults), kinds[faultKill], kinds[faultFreeze], kinds[faultStalledStart], kinds[faultFrozenSessions], faulty.Round(time.Second))
	fmt.Printf("%d sessions, %d queries, %d events; %d clients over %d connections; %d requests repeated\n", len(e.Log), len(e.Accepted), total, len(d.clients), connections, d.retries)
	fmt.Printf("%d more sessions were deleted meanwhile, and erased\n", d.deleted)
	fmt.Printf("clients received %d pieces of text in flight, of %d blocks\n", pieces, len(seen))
	fmt.Printf("longest time without an event for any client while a query was open: %s\n", d.stall.Round(10*time.Millisecond))
}
