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

// binaryWithin is how many bytes of a file are looked at for a NUL.
const binaryWithin = 8000

// settle tells about files that have come to rest, or of all.
func (w *Watcher) settle(ctx context.Context, now time.Time, all bool) {
	due := slices.SortedFunc(maps.Values(w.dirty), func(a, b *suspect) int { return cmp.Compare(a.order, b.order) })
	if len(due) > 0 {
		w.flood.begins(w.cfg.Sink.Tell(ctx))
	}
	newRules := false
	var tell []events.Payload
	for _, s := range due {
		if !all && now.Sub(s.last) < w.cfg.Quiet && now.Sub(s.first) < w.cfg.Latest {
			continue
		}
		rel := join(s.in.path, s.name)
		delete(w.dirty, rel)
		p := w.verdict(s, rel)
		if p == nil {
			continue
		}
		newRules = newRules || rel == IgnoreFile
		if w.flood.admit(now, p, w.cfg.PerSecond, w.cfg.PerTurn) {
			tell = append(tell, w.complete(p))
		}
	}
	if tell = append(tell, w.flood.says(now, all)...); len(tell) > 0 {
		w.cfg.Sink.Tell(ctx, tell...)
	}
	if newRules {
		w.relearn()
		if notes := w.flood.says(now, false); len(notes) > 0 {
			w.cfg.Sink.Tell(ctx, notes...)
		}
	}
}

// pending tells whether settle has something to do soon.
func (w *Watcher) pending() bool { return len(w.dirty) > 0 || w.flood.waiting() }

// verdict compares a file with what was last reported of it, nil for no change.
func (w *Watcher) verdict(s *suspect, rel string) events.Payload {
	info, err := os.Lstat(w.at(rel))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		w.cfg.Log.Warn("look at a file of the workspace", "path", rel, "err", err)
		return nil
	}
	name := strings.ToValidUTF8(rel, "\uFFFD")
	if err != nil || !info.Mode().IsRegular() { // a symlink is none either
		delete(s.in.files, s.name)
		if !s.known {
			return nil
		}
		return events.FileDeleted{Path: name}
	}
	now := describe(info)
	s.in.put(s.name, now)
	size := uint64(max(0, now.size)) //nolint:gosec // not negative
	switch {
	case !s.known:
		return events.FileCreated{Path: name, Size: size}
	case s.written || !now.like(s.was):
		return events.FileModified{Path: name, Size: size}
	}
	return nil
}

// like leaves the place on disk out: it is often decided later.
func (f file) like(g file) bool {
	return f.size == g.size && f.modTime == g.modTime && f.inode == g.inode
}

// complete adds what has to be read from the file.
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

// binary tells whether a file has a NUL at its beginning. One that is gone, or cannot be read, has none.
func (w *Watcher) binary(rel string) bool {
	f, err := os.OpenFile(w.at(rel), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
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

// relearn begins anew with other rules, and reports nothing of what they change.
func (w *Watcher) relearn() {
	for wd := range w.watched {
		w.notifier.remove(wd)
	}
	clear(w.watched)
	w.root = &folder{wd: -1}
	w.readRules()
	w.learn()
}

// learn takes all that is there as known.
func (w *Watcher) learn() {
	w.learning = true
	w.resync(w.root)
	w.learning = false
}

// readBounded reads an ignore file.
func readBounded(f *os.File) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(f, maxIgnore+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(raw) > maxIgnore {
		return raw[:bytes.LastIndexByte(raw[:maxIgnore], '\n')+1], fmt.Errorf("has more than %d bytes; what comes after is left out", maxIgnore)
	}
	return raw, nil
}

func warning(message string) events.Payload {
	return events.Log{Level: "warn", Stream: "runner", Message: message}
}

// flood bounds how much is told.
type flood struct {
	second    time.Time // when the present second began
	inSecond  int       // told in it
	inTurn    int       // told of this execution
	execution string
	warned    bool // of this execution
	full      bool // nothing more is told of this execution
	counts    struct{ created, modified, deleted int }
	notes     []events.Payload
}

// admit tells whether an event is told; else it is counted.
func (f *flood) admit(now time.Time, p events.Payload, perSecond, perTurn int) bool {
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

// note has something told at the next occasion.
func (f *flood) note(p events.Payload) { f.notes = append(f.notes, p) }

// counted is how many events were not told.
func (f *flood) counted() int { return f.counts.created + f.counts.modified + f.counts.deleted }

// waiting tells whether something is to be said although nothing changes any more.
func (f *flood) waiting() bool { return len(f.notes) > 0 || f.counted() > 0 && !f.full }

// says gives the notes, and the numbers once the flood is over: after a second
// with room, or at a turn's end.
func (f *flood) says(now time.Time, all bool) []events.Payload {
	if f.counted() > 0 && (all || !f.full && now.Sub(f.second) >= time.Second) {
		f.note(warning(fmt.Sprintf("not listed: %d files created, %d modified, %d deleted", f.counts.created, f.counts.modified, f.counts.deleted)))
		f.counts.created, f.counts.modified, f.counts.deleted = 0, 0, 0
	}
	out := f.notes
	f.notes = nil
	return out
}

// begins learns which execution runs.
func (f *flood) begins(execution string) {
	if execution != f.execution {
		f.execution, f.inTurn, f.warned, f.full = execution, 0, false, false
	}
}
