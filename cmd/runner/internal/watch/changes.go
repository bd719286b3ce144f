package watch

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
)

// maxTrackedFolders is the maximum number of folders that a changeTracker remembers. With more, all folders count as changed.
const maxTrackedFolders = 4096

// ChangedFolder is a folder of the workspace in which something may have changed since the last snapshot.
type ChangedFolder struct {
	Path string // relative to the workspace, "" for itself
	Deep bool   // also in all folders below it
}

// errAnswerOutdated is returned when a snapshot confirms an answer of the changeTracker, but another snapshot has asked for an answer since.
var errAnswerOutdated = errors.New("another snapshot has asked meanwhile")

// changeTracker records in which folders of the workspace something has changed, so that a snapshot walks only these. A snapshot asks for an answer
// and confirms the answer once the snapshot is stored; until then, later answers repeat the changes. Folders that are not watched are in every
// answer. Changes of ignored files are recorded too. A changeTracker is safe for concurrent use.
type changeTracker struct {
	mu        sync.Mutex
	name      string // of this tracker, which is in its tokens
	answers   uint64
	confirmed string             // token of the last confirmed answer
	changes   changedFolders     // since the last answer
	open      *unconfirmedAnswer // not confirmed yet
	unwatched map[string]bool    // folders without a watch
	blind     string             // why no changes are recorded, so that every answer is "everything"; "" if they are
}

// changedFolders is a set of folders in which something has changed.
type changedFolders struct {
	reason  string // why everything may have changed; "" if folders has all changes
	folders map[string]bool
}

// unconfirmedAnswer is an answer of the changeTracker that no stored snapshot has confirmed yet.
type unconfirmedAnswer struct {
	token string
	changedFolders
}

// newChangeTracker returns a changeTracker whose first answer is that everything may have changed.
func newChangeTracker() *changeTracker {
	return &changeTracker{name: rand.Text(), changes: changedFolders{reason: "the watcher has just started", folders: map[string]bool{}}, unwatched: map[string]bool{}}
}

// markFolder records that something has changed in the folder path, and if deep is set, in any folder below it.
func (t *changeTracker) markFolder(path string, deep bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes.addFolder(path, deep)
}

// addFolder adds the folder path to the set, and if deep is set, all folders below it.
func (c *changedFolders) addFolder(path string, deep bool) {
	if c.reason != "" {
		return
	}
	if c.folders[path] = c.folders[path] || deep; len(c.folders) > maxTrackedFolders {
		c.addAll(fmt.Sprintf("more than %d folders have changed", maxTrackedFolders))
	}
}

// markAll records that something may have changed in any folder, for the given reason.
func (t *changeTracker) markAll(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes.addAll(reason)
}

// addAll makes the set contain all folders, for the given reason.
func (c *changedFolders) addAll(reason string) {
	if c.reason == "" {
		c.reason, c.folders = reason, map[string]bool{}
	}
}

// stopTracking records that changes are no longer known, for the given reason, so that every later answer contains all folders.
func (t *changeTracker) stopTracking(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blind = reason
}

// setWatched records whether the folder path is watched. Changes in a folder that is not watched, and below it, are not known.
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

// markRemoved records that the folder path no longer exists: neither it nor a folder that was below it counts as unwatched.
func (t *changeTracker) markRemoved(path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.unwatched, func(p string, _ bool) bool { return p == path || strings.HasPrefix(p, path+"/") })
}

// restartTracking records that everything may have changed, and that no folder counts as unwatched, because all watches are about to be added
// again.
func (t *changeTracker) restartTracking(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.unwatched)
	t.changes.addAll(reason)
}

// takeAnswer returns the folders in which something may have changed since the answer with the token since. If that is not the last confirmed
// answer, all folders may have changed. The caller must call confirmAnswer or returnAnswer with the token of the result.
func (t *changeTracker) takeAnswer(since string) ChangeAnswer {
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
	t.open = &unconfirmedAnswer{token: fmt.Sprintf("%s-%d", t.name, t.answers), changedFolders: t.changes}
	t.changes = changedFolders{folders: map[string]bool{}}
	return t.newAnswer(t.open.token, t.open.changedFolders)
}

// peekAnswer returns the folders in which something has changed since the last answer. The next answer contains them again.
func (t *changeTracker) peekAnswer() ChangeAnswer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newAnswer("", t.changes)
}

// newAnswer returns an Answer with the folders of a set of changes and with the folders that are not watched.
func (t *changeTracker) newAnswer(token string, c changedFolders) ChangeAnswer {
	a := ChangeAnswer{Token: token, Reason: c.reason}
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

// confirmAnswer records that a stored snapshot contains all changes of the answer with a token. It returns errAnswerOutdated if there was another
// answer since.
func (t *changeTracker) confirmAnswer(token string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil || t.open.token != token {
		return errAnswerOutdated
	}
	t.confirmed, t.open = token, nil
	return nil
}

// returnAnswer makes the next answer contain the changes of the answer with a token, unless that answer was confirmed.
func (t *changeTracker) returnAnswer(token string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open != nil && t.open.token == token {
		t.mergeUnconfirmedAnswer()
	}
}

// mergeUnconfirmedAnswer adds the changes of the unconfirmed answer, if there is one, to the changes since then.
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
