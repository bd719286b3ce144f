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

// binarySearchBytes is the number of bytes at the beginning of a file that are searched for a NUL, which marks the file as binary.
const binarySearchBytes = 8000

// reportDueChanges reports the changes of files that have not changed for Config.Quiet, or have changed for Config.Latest. If all is set, it reports
// the changes of all files at once.
func (w *Watcher) reportDueChanges(ctx context.Context, now time.Time, all bool) {
	due := slices.SortedFunc(maps.Values(w.dirty), func(a, b *suspectFile) int { return cmp.Compare(a.order, b.order) })
	if len(due) > 0 {
		w.flood.setExecution(w.cfg.Sink.JournalEvents(ctx))
	}
	newRules := false
	var tell []events.Payload
	for _, s := range due {
		if !all && now.Sub(s.last) < w.cfg.Quiet && now.Sub(s.first) < w.cfg.Latest {
			continue
		}
		rel := joinRelative(s.in.path, s.name)
		delete(w.dirty, rel)
		p := w.changeEvent(s, rel)
		if p == nil {
			continue
		}
		newRules = newRules || rel == IgnoreFile
		if w.flood.admitEvent(now, p, w.cfg.PerSecond, w.cfg.PerTurn) {
			tell = append(tell, w.completeEvent(p))
		}
	}
	if tell = append(tell, w.flood.takeReports(now, all)...); len(tell) > 0 {
		w.cfg.Sink.JournalEvents(ctx, tell...)
	}
	if newRules {
		w.applyIgnoreRules()
		if notes := w.flood.takeReports(now, false); len(notes) > 0 {
			w.cfg.Sink.JournalEvents(ctx, notes...)
		}
	}
}

// hasPendingReports reports whether reportDueChanges must be called soon, because files have changed or the rate limiter has something to report.
func (w *Watcher) hasPendingReports() bool { return len(w.dirty) > 0 || w.flood.hasPendingCounts() }

// changeEvent returns the event for the difference between a file and the last report about it: created, modified or deleted. It returns nil if
// nothing has changed.
func (w *Watcher) changeEvent(s *suspectFile, rel string) events.Payload {
	info, err := os.Lstat(w.absolutePath(rel))
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
	now := fileStateOf(info)
	s.in.putFile(s.name, now)
	size := uint64(max(0, now.size)) //nolint:gosec // not negative
	switch {
	case !s.known:
		return events.FileCreated{Path: name, Size: size}
	case s.written || !now.equalsExceptBlocks(s.was):
		return events.FileModified{Path: name, Size: size}
	}
	return nil
}

// equalsExceptBlocks reports whether two states of a file are equal, except for the number of blocks on disk, which the file system often allocates
// later.
func (f fileState) equalsExceptBlocks(g fileState) bool {
	return f.size == g.size && f.modTime == g.modTime && f.inode == g.inode
}

// completeEvent returns the event p with those fields for which the file has to be read.
func (w *Watcher) completeEvent(p events.Payload) events.Payload {
	switch e := p.(type) {
	case events.FileCreated:
		e.Binary = w.isBinary(e.Path)
		return e
	case events.FileModified:
		e.Binary = w.isBinary(e.Path)
		return e
	}
	return p
}

// isBinary reports whether the file rel has a NUL in its first binarySearchBytes bytes. It returns false for a file that does not exist or cannot
// be read.
func (w *Watcher) isBinary(rel string) bool {
	f, err := os.OpenFile(w.absolutePath(rel), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read from
	head := make([]byte, binarySearchBytes)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		w.cfg.Log.Debug("read the beginning of a file", "path", rel, "err", err)
	}
	return bytes.IndexByte(head[:n], 0) >= 0
}

// applyIgnoreRules reads the ignore file and adds all watches again. It reports no event for files that have become ignored, or no longer are.
func (w *Watcher) applyIgnoreRules() {
	for wd := range w.watched {
		w.notifier.removeWatch(wd)
	}
	clear(w.watched)
	w.unwatchIgnoredBelow("")
	w.root = &watchedFolder{wd: -1}
	w.tracker.restartTracking("other rules for ignored files apply")
	w.readIgnoreRules()
	w.recordExistingFiles()
}

// recordExistingFiles records all files that exist, without events, and adds the watches of their folders.
func (w *Watcher) recordExistingFiles() {
	w.learning = true
	w.compareFolder(w.root)
	w.learning = false
}

// readIgnoreFile reads and closes an ignore file. If the file is too large, it returns the lines within maxIgnoreFile, and an error.
func readIgnoreFile(f *os.File) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(f, maxIgnoreFile+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(raw) > maxIgnoreFile {
		return raw[:bytes.LastIndexByte(raw[:maxIgnoreFile], '\n')+1], fmt.Errorf("has more than %d bytes; the rest is ignored", maxIgnoreFile)
	}
	return raw, nil
}

// warningEvent returns a log event of level warn.
func warningEvent(message string) events.Payload {
	return events.Log{Level: "warn", Stream: "runner", Message: message}
}

// rateLimiter limits how many changes of files are reported as events, and counts the changes that are not reported.
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

// admitEvent reports whether an event is to be reported. Otherwise it counts the event.
func (f *rateLimiter) admitEvent(now time.Time, p events.Payload, perSecond, perTurn int) bool {
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
		f.queueNote(warningEvent(fmt.Sprintf("so many files change that only %d a second and %d a turn are listed; the others are counted", perSecond, perTurn)))
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

// queueNote queues an event that the next call of takeReports returns.
func (f *rateLimiter) queueNote(p events.Payload) { f.notes = append(f.notes, p) }

// countUnreported returns the number of events that were not admitted since the last report.
func (f *rateLimiter) countUnreported() int {
	return f.counts.created + f.counts.modified + f.counts.deleted
}

// hasPendingCounts reports whether takeReports will return something later, even if no file changes any more.
func (f *rateLimiter) hasPendingCounts() bool {
	return len(f.notes) > 0 || f.countUnreported() > 0 && !f.full
}

// takeReports returns the queued notes, and the counts of unreported events after a second in which all events were admitted, or at the end of a
// turn (all).
func (f *rateLimiter) takeReports(now time.Time, all bool) []events.Payload {
	if f.countUnreported() > 0 && (all || !f.full && now.Sub(f.second) >= time.Second) {
		f.queueNote(warningEvent(fmt.Sprintf("not listed: %d files created, %d modified, %d deleted", f.counts.created, f.counts.modified, f.counts.deleted)))
		f.counts.created, f.counts.modified, f.counts.deleted = 0, 0, 0
	}
	out := f.notes
	f.notes = nil
	return out
}

// setExecution sets the id of the running execution. If it is another execution than before, the counts of the execution begin at 0.
func (f *rateLimiter) setExecution(execution string) {
	if execution != f.execution {
		f.execution, f.inTurn, f.warned, f.full = execution, 0, false, false
	}
}
