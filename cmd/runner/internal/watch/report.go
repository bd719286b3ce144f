package watch

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// binaryWithin is the number of bytes at the beginning of a file that are searched for a NUL.
const binaryWithin = 8000

// reportDue reports the changes of files that have not changed for Config.Quiet, or have changed for Config.Latest. If all is set, it reports
// the changes of all files at once.
func (w *Watcher) reportDue(ctx context.Context, now time.Time, all bool) {
	due := slices.SortedFunc(maps.Values(w.dirty), func(a, b *suspect) int { return cmp.Compare(a.order, b.order) })
	if len(due) > 0 {
		w.flood.setExecution(w.cfg.Sink.JournalEvents(ctx))
	}
	newRules := false
	var tell []events.Payload
	for _, s := range due {
		if !all && now.Sub(s.last) < w.cfg.Quiet && now.Sub(s.first) < w.cfg.Latest {
			continue
		}
		rel := join(s.in.path, s.name)
		delete(w.dirty, rel)
		p := w.changeOf(s, rel)
		if p == nil {
			continue
		}
		newRules = newRules || rel == IgnoreFile
		if w.flood.admit(now, p, w.cfg.PerSecond, w.cfg.PerTurn) {
			tell = append(tell, w.complete(p))
		}
	}
	if tell = append(tell, w.flood.report(now, all)...); len(tell) > 0 {
		w.cfg.Sink.JournalEvents(ctx, tell...)
	}
	if newRules {
		w.applyNewRules()
		if notes := w.flood.report(now, false); len(notes) > 0 {
			w.cfg.Sink.JournalEvents(ctx, notes...)
		}
	}
}

// pending reports whether reportDue has to be called soon, because files have changed or the rate limiter has something
// to report.
func (w *Watcher) pending() bool { return len(w.dirty) > 0 || w.flood.waiting() }

// changeOf returns the event for the difference between a file and what was last reported about it: created, modified or deleted. It returns nil if
// nothing has changed.
func (w *Watcher) changeOf(s *suspect, rel string) events.Payload {
	info, err := os.Lstat(w.absolute(rel))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		w.cfg.Log.Warn("look at a file of the workspace", "path", rel, "err", err)
		return nil
	}
	name := strings.ToValidUTF8(rel, "\uFFFD")
	if err != nil || !info.Mode().IsRegular() { // a symbolic link is not a regular file
		delete(s.in.files, s.name)
		if !s.known {
			return nil
		}
		return events.FileDeleted{Path: name}
	}
	now := fileOf(info)
	s.in.put(s.name, now)
	size := uint64(max(0, now.size)) //nolint:gosec // not negative
	switch {
	case !s.known:
		return events.FileCreated{Path: name, Size: size}
	case s.written || !now.equals(s.was):
		return events.FileModified{Path: name, Size: size}
	}
	return nil
}

// equals reports whether the files are equal except for their blocks on disk, which the file system often allocates
// later.
func (f file) equals(g file) bool {
	return f.size == g.size && f.modTime == g.modTime && f.inode == g.inode
}

// complete returns an event with the fields for which the file has to be read.
func (w *Watcher) complete(p events.Payload) events.Payload {
	switch e := p.(type) {
	case events.FileCreated:
		e.Binary = w.binary(e.Path)
		return e
	case events.FileModified:
		e.Binary = w.binary(e.Path)
		return e
	}
	return p
}

// binary reports whether a file has a NUL in its first binaryWithin bytes. It reports false for a file that does not exist or cannot be read.
func (w *Watcher) binary(rel string) bool {
	f, err := os.OpenFile(w.absolute(rel), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read from
	head := make([]byte, binaryWithin)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		w.cfg.Log.Debug("read the beginning of a file", "path", rel, "err", err)
	}
	return bytes.IndexByte(head[:n], 0) >= 0
}

// applyNewRules reads the ignore file and adds all watches again. It reports no event for files that are ignored from now on, or no longer.
func (w *Watcher) applyNewRules() {
	for wd := range w.watched {
		w.notifier.remove(wd)
	}
	clear(w.watched)
	w.forgetIgnored("")
	w.root = &folder{wd: -1}
	w.tracker.restart("other rules for ignored files apply")
	w.readRules()
	w.recordPresent()
}

// recordPresent records all files that exist, without events, and adds the watches of their folders.
func (w *Watcher) recordPresent() {
	w.learning = true
	w.resync(w.root)
	w.learning = false
}

// readBounded reads and closes an ignore file. If the file is too large, it returns the lines within maxIgnore, and an error.
func readBounded(f *os.File) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(f, maxIgnore+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(raw) > maxIgnore {
		return raw[:bytes.LastIndexByte(raw[:maxIgnore], '\n')+1], fmt.Errorf("has more than %d bytes; the rest is ignored", maxIgnore)
	}
	return raw, nil
}

// warning returns a log event of level warn.
func warning(message string) events.Payload {
	return events.Log{Level: "warn", Stream: "runner", Message: message}
}

// rateLimiter limits how many changes of files are reported as events, and counts the others.
type rateLimiter struct {
	second    time.Time // start of the current second
	inSecond  int       // reported in the current second
	inTurn    int       // reported for this execution
	execution string
	warned    bool // for this execution
	full      bool // nothing more is reported for this execution
	counts    struct{ created, modified, deleted int }
	notes     []events.Payload
}

// admit reports whether an event is to be reported; otherwise it counts the event.
func (f *rateLimiter) admit(now time.Time, p events.Payload, perSecond, perTurn int) bool {
	if now.Sub(f.second) >= time.Second {
		f.second, f.inSecond = now, 0
	}
	if f.full = f.inTurn >= perTurn; !f.full && f.inSecond < perSecond {
		f.inSecond++
		f.inTurn++
		return true
	}
	if !f.warned {
		f.warned = true
		f.note(warning(fmt.Sprintf("so many files change that only %d a second and %d a turn are listed; the others are counted", perSecond, perTurn)))
	}
	switch p.(type) {
	case events.FileCreated:
		f.counts.created++
	case events.FileModified:
		f.counts.modified++
	case events.FileDeleted:
		f.counts.deleted++
	}
	return false
}

// note queues a payload that the next call of report returns.
func (f *rateLimiter) note(p events.Payload) { f.notes = append(f.notes, p) }

// countUnreported returns the number of events that were not reported.
func (f *rateLimiter) countUnreported() int {
	return f.counts.created + f.counts.modified + f.counts.deleted
}

// waiting reports whether report has something to return later, even if no file changes any more.
func (f *rateLimiter) waiting() bool { return len(f.notes) > 0 || f.countUnreported() > 0 && !f.full }

// report returns the queued notes, and the counts once the flood is over: after a second in which all events were
// admitted, or at the end of a turn.
func (f *rateLimiter) report(now time.Time, all bool) []events.Payload {
	if f.countUnreported() > 0 && (all || !f.full && now.Sub(f.second) >= time.Second) {
		f.note(warning(fmt.Sprintf("not listed: %d files created, %d modified, %d deleted", f.counts.created, f.counts.modified, f.counts.deleted)))
		f.counts.created, f.counts.modified, f.counts.deleted = 0, 0, 0
	}
	out := f.notes
	f.notes = nil
	return out
}

// setExecution sets the running execution. For another one than before, the counts of the execution begin at 0.
func (f *rateLimiter) setExecution(execution string) {
	if execution != f.execution {
		f.execution, f.inTurn, f.warned, f.full = execution, 0, false, false
	}
}
