package watch

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
)

// maxTrackedFolders is the largest number of folders that a tracker remembers. With more, all folders count as changed.
const maxTrackedFolders = 4096

// ChangedFolder is a folder of the workspace in which something may have changed since the last snapshot.
type ChangedFolder struct {
	Path string // relative to the workspace, "" for itself
	Deep bool   // also in all folders below it
}

// errAnswerOutdated is returned when a snapshot confirms an answer of the tracker, but another snapshot has asked the
// tracker since.
var errAnswerOutdated = errors.New("another snapshot has asked meanwhile")

// changeTracker records in which folders of the workspace something has changed, so that a snapshot needs to look into these
// only. A snapshot asks for an answer and confirms it once the snapshot is stored; until then, later answers repeat the
// changes. Folders that are not watched are in every answer. Ignored files are covered too. A tracker is safe for
// concurrent use.
type changeTracker struct {
	mu        sync.Mutex
	name      string // of this tracker, which is in its tokens
	answers   uint64
	confirmed string             // token of the last confirmed answer
	changes   changeSet          // since the last answer
	open      *unconfirmedAnswer // not confirmed yet
	unwatched map[string]bool    // folders without a watch
	blind     string             // why no changes are recorded, so that every answer is "everything"; "" if they are
}

// changeSet is a set of folders in which something has changed.
type changeSet struct {
	reason  string // why everything may have changed; "" if folders has all changes
	folders map[string]bool
}

// unconfirmedAnswer is an answer of the watcher about what has changed, which no stored snapshot has confirmed yet.
type unconfirmedAnswer struct {
	token string
	changeSet
}

// newChangeTracker returns a tracker whose first answer is that everything may have changed.
func newChangeTracker() *changeTracker {
	return &changeTracker{name: rand.Text(), changes: changeSet{reason: "the watcher has just started", folders: map[string]bool{}}, unwatched: map[string]bool{}}
}

// markFolder records that something has changed in a folder, and if deep is set, in any folder below it.
func (t *changeTracker) markFolder(path string, deep bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes.addFolder(path, deep)
}

func (c *changeSet) addFolder(path string, deep bool) {
	if c.reason != "" {
		return
	}
	if c.folders[path] = c.folders[path] || deep; len(c.folders) > maxTrackedFolders {
		c.addAll(fmt.Sprintf("more than %d folders have changed", maxTrackedFolders))
	}
}

// markAll records that something may have changed anywhere.
func (t *changeTracker) markAll(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes.addAll(reason)
}

func (c *changeSet) addAll(reason string) {
	if c.reason == "" {
		c.reason, c.folders = reason, map[string]bool{}
	}
}

// stopTracking records that no changes are known from now on.
func (t *changeTracker) stopTracking(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blind = reason
}

// setWatched records whether a folder is watched. Changes of a folder that is not watched, and below it, are not known.
func (t *changeTracker) setWatched(path string, watched bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if watched {
		delete(t.unwatched, path)
		return
	}
	t.unwatched[path] = true
	t.changes.addFolder(path, true)
}

// markRemoved records that a folder no longer exists at a path: neither it nor what was below it counts as unwatched.
func (t *changeTracker) markRemoved(path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.unwatched, func(p string, _ bool) bool { return p == path || strings.HasPrefix(p, path+"/") })
}

// markAllUnwatched records that everything may have changed, and that all watches are added again.
func (t *changeTracker) markAllUnwatched(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.unwatched)
	t.changes.addAll(reason)
}

// takeAnswer returns what may have changed since the answer with the token since. If that is not the last confirmed answer, everything may have
// changed. The caller must call confirm or returnAnswer with the token of the result.
func (t *changeTracker) takeAnswer(since string) Answer {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mergeUnconfirmedAnswer()
	if since == "" || since != t.confirmed {
		t.changes.addAll("the last snapshot is not the one that the watcher knows")
	}
	if len(t.unwatched) > maxTrackedFolders {
		t.changes.addAll(fmt.Sprintf("more than %d folders are not watched", maxTrackedFolders))
	}
	t.answers++
	t.open = &unconfirmedAnswer{token: fmt.Sprintf("%s-%d", t.name, t.answers), changeSet: t.changes}
	t.changes = changeSet{folders: map[string]bool{}}
	return t.newAnswer(t.open.token, t.open.changeSet)
}

// peekAnswer returns what has changed since the last answer. The next answer has it again.
func (t *changeTracker) peekAnswer() Answer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newAnswer("", t.changes)
}

// newAnswer returns a set of changes as an Answer, with the folders that are not watched.
func (t *changeTracker) newAnswer(token string, c changeSet) Answer {
	a := Answer{Token: token, Reason: c.reason}
	if t.blind != "" {
		a.Reason = t.blind
	}
	if a.All = a.Reason != ""; a.All {
		return a
	}
	for path, deep := range c.folders {
		a.Folders = append(a.Folders, ChangedFolder{path, deep || t.unwatched[path]})
	}
	for path := range t.unwatched {
		if _, listed := c.folders[path]; !listed {
			a.Folders = append(a.Folders, ChangedFolder{path, true})
		}
	}
	return a
}

// confirmAnswer records that a snapshot contains everything of the answer with a token. It returns errAnswerOutdated if there was another answer since.
func (t *changeTracker) confirmAnswer(token string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil || t.open.token != token {
		return errAnswerOutdated
	}
	t.confirmed, t.open = token, nil
	return nil
}

// returnAnswer makes the next answer contain what the answer with a token contained, unless that was confirmed.
func (t *changeTracker) returnAnswer(token string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open != nil && t.open.token == token {
		t.mergeUnconfirmedAnswer()
	}
}

// mergeUnconfirmedAnswer adds the changes of the open answer, if there is one, to those since.
func (t *changeTracker) mergeUnconfirmedAnswer() {
	if t.open == nil {
		return
	}
	if t.open.reason != "" {
		t.changes.addAll(t.open.reason)
	}
	for path, deep := range t.open.folders {
		t.changes.addFolder(path, deep)
	}
	t.open = nil
}
