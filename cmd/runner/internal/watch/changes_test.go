package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// answer returns what the tracker has, after all earlier changes.
func (s *scene) answer(since string) ChangeAnswer {
	s.t.Helper()
	s.w.awaitTracked(s.t.Context())
	return s.w.tracker.takeAnswer(since)
}

// confirmed returns the token of an answer that has everything so far.
func (s *scene) confirmed() string {
	s.t.Helper()
	a := s.answer("")
	s.must(s.w.tracker.confirmAnswer(a.Token))
	return a.Token
}

// wantFolders compares an answer; the path of a folder with everything below it ends with a slash.
func (s *scene) wantFolders(a ChangeAnswer, want ...string) {
	s.t.Helper()
	var got []string
	for _, f := range a.Folders {
		got = append(got, f.Path+map[bool]string{true: "/"}[f.Deep])
	}
	slices.Sort(got)
	if a.All || !slices.Equal(got, want) {
		s.t.Errorf("all %t (%s), folders %q, want %q", a.All, a.Reason, got, want)
	}
}

func TestChanges_NameTheFolders(t *testing.T) {
	t.Parallel()
	s := watch(t, func(s *scene) { s.write("a/b/f", "1"); s.write("c/f", "1"); s.write(".git/HEAD", "1") }, Config{Quiet: never, Latest: never})
	token := s.confirmed()
	next := func(want ...string) {
		t.Helper()
		a := s.answer(token)
		s.wantFolders(a, want...)
		s.must(s.w.tracker.confirmAnswer(a.Token))
		token = a.Token
	}
	next()
	s.write("a/b/f", "2")
	next("a/b")
	s.must(os.Chmod(s.absolute("c/f"), 0o600))
	next("c")
	s.must(os.Chmod(s.absolute("a/b"), 0o700)) //nolint:gosec // a test
	next("a", "a/b")
	s.write("x.swp", "ignored")
	next("")
	s.move("a", "c/moved")
	next("", "c", "c/moved/")
	s.write("c/moved/b/f", "3")
	next("c/moved/b")
	s.write(".git/HEAD", "2")
	next(".git")
	s.mkdir("c/node_modules/p/q")
	next("c", "c/node_modules/")
	s.write("c/node_modules/p/q/f", "1")
	next("c/node_modules/p/q")
	s.must(os.Chmod(s.absolute("c/node_modules/p"), 0o700)) //nolint:gosec // a test
	next("c/node_modules", "c/node_modules/p")
	s.move("c/node_modules/p/q", "c/node_modules/r")
	next("c/node_modules", "c/node_modules/p", "c/node_modules/r/")
	s.write("c/node_modules/r/f", "2")
	next("c/node_modules/r")
	s.move("c", "d")
	next("", "d/")
	s.write("d/node_modules/r/f", "3")
	next("d/node_modules/r")
	s.move("d/node_modules", "d/modules") // not ignored any more
	next("d", "d/modules/")
	s.write("d/modules/r/f", "4")
	next("d/modules/r")
	s.remove("d")
	a := s.answer(token)
	if !slices.Contains(a.Folders, ChangedFolder{}) || a.All {
		t.Errorf("after a removal: %+v", a)
	}
	s.must(s.w.tracker.confirmAnswer(a.Token))
	token = a.Token
	next()
	if s.w.awaitTracked(t.Context()); len(s.w.ignored) != 1 {
		t.Errorf("watched ignored folders: %v", s.w.ignored)
	}
}

// Ignored folders are watched only as long as the others do not need the watches.
func TestChanges_IgnoredFoldersYieldTheirWatches(t *testing.T) {
	t.Parallel()
	s := watch(t, func(s *scene) { s.mkdir("a"); s.mkdir("node_modules/p/q") }, Config{Quiet: never, Latest: never, open: func() (changeSource, error) {
		n, err := newInotifyReader()
		return &counted{inotifyReader: n, most: 6, have: map[int]bool{}}, err
	}})
	token := s.confirmed()
	s.write("node_modules/p/q/f", "1")
	s.wantFolders(s.answer(token), "node_modules/p/q")
	token = s.confirmed()
	s.mkdir("b/c") // with the workspace, a and node_modules these are seven
	a := s.answer(token)
	for _, want := range []string{"b", "node_modules", "node_modules/p", "node_modules/p/q"} {
		if a.All || !slices.Contains(a.Folders, ChangedFolder{want, true}) {
			t.Errorf("%s is not in %+v", want, a)
		}
	}
	s.write("b/c/f", "1")
	s.want("+b/c/f 1")
}

// counted is a changeSource with a limited number of watches.
type counted struct {
	*inotifyReader
	most int
	have map[int]bool
}

func (c *counted) addWatch(dir string) (int, error) {
	wd, err := c.inotifyReader.addWatch(dir)
	if err != nil || c.have[wd] {
		return wd, err
	}
	if len(c.have) == c.most {
		c.inotifyReader.removeWatch(wd)
		return 0, fmt.Errorf("watch %s: %w", dir, syscall.ENOSPC)
	}
	c.have[wd] = true
	return wd, nil
}

func (c *counted) removeWatch(wd int) {
	delete(c.have, wd)
	c.inotifyReader.removeWatch(wd)
}

// An answer stays until a snapshot has confirmed it, and another token than the last confirmed one gets everything.
func TestChanges_StayUntilConfirmed(t *testing.T) {
	t.Parallel()
	s := watch(t, func(s *scene) { s.write("a/f", "1"); s.write("b/f", "1") }, Config{Quiet: never, Latest: never})
	if a := s.answer(""); !a.All {
		t.Errorf("the first answer: %+v", a)
	}
	token := s.confirmed()
	s.write("a/f", "2")
	lost := s.answer(token)
	s.wantFolders(lost, "a")
	s.w.tracker.returnAnswer(lost.Token)
	s.write("b/f", "2")
	both := s.answer(token)
	s.wantFolders(both, "a", "b")
	if err := s.w.tracker.confirmAnswer(lost.Token); !errors.Is(err, errAnswerOutdated) {
		t.Errorf("a confirmation of an answer that was given back: %v", err)
	}
	again := s.answer(token) // both was not confirmed
	s.wantFolders(again, "a", "b")
	s.must(s.w.tracker.confirmAnswer(again.Token))
	if a := s.answer(token); !a.All {
		t.Errorf("an earlier token: %+v", a)
	}
}

func TestChanges_InDoubtEverything(t *testing.T) {
	t.Parallel()
	all := func(t *testing.T, s *scene, token, reason string) {
		t.Helper()
		if a := s.answer(token); !a.All || !strings.Contains(a.Reason, reason) || len(a.Folders) > 0 {
			t.Errorf("answer %+v, want everything because %s", a, reason)
		}
	}
	t.Run("overflow of the kernel's queue", func(t *testing.T) {
		t.Parallel()
		gate := make(chan struct{})
		s := watch(t, func(s *scene) { s.mkdir("d"); s.sink.gate = gate }, Config{Quiet: time.Millisecond, Latest: time.Millisecond})
		token := s.confirmed()
		for i := range many {
			s.must(os.WriteFile(s.absolute(fmt.Sprintf("d/%d", i)), nil, 0o644))
		}
		close(gate)
		all(t, s, token, "") // the watcher may still be comparing all files, and then does not answer in time
		token = s.confirmed()
		s.write("d/1", "x")
		s.wantFolders(s.answer(token), "d")
	})
	t.Run("a watcher that does not answer", func(t *testing.T) {
		t.Parallel()
		s := watch(t, nil, Config{Quiet: never, Latest: never})
		token := s.confirmed()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s.w.awaitTracked(ctx)
		if a := s.w.tracker.takeAnswer(token); !a.All {
			t.Errorf("answer %+v", a)
		}
	})
	t.Run("too many folders", func(t *testing.T) {
		t.Parallel()
		s := watch(t, nil, Config{Quiet: never, Latest: never})
		token := s.confirmed()
		for i := range maxTrackedFolders + 1 {
			s.w.tracker.markFolder(fmt.Sprint(i), false)
		}
		all(t, s, token, "more than")
	})
	t.Run("other rules", func(t *testing.T) {
		t.Parallel()
		s := watch(t, func(s *scene) { s.mkdir("out") }, Config{Quiet: never, Latest: never})
		token := s.confirmed()
		s.write(IgnoreFile, "out\n")
		s.flush()
		all(t, s, token, "rules")
		token = s.confirmed()
		s.wantFolders(s.answer(token))
		token = s.confirmed()
		s.mkdir("out/in")
		s.wantFolders(s.answer(token), "out", "out/in/")
	})
	t.Run("polling", func(t *testing.T) {
		t.Parallel()
		s := watch(t, nil, Config{Quiet: never, Latest: never, Polling: true})
		all(t, s, s.confirmed(), "polled")
	})
	t.Run("too many watches", func(t *testing.T) {
		t.Parallel()
		s := watch(t, func(s *scene) { s.mkdir("a/b") }, Config{Quiet: never, Latest: never, open: func() (changeSource, error) {
			n, err := newInotifyReader()
			return &refusing{inotifyReader: n, dir: "b", why: syscall.ENOSPC}, err
		}})
		all(t, s, s.confirmed(), "does not watch")
	})
	t.Run("a folder that cannot be watched", func(t *testing.T) {
		t.Parallel()
		s := watch(t, func(s *scene) { s.write("a/b/f", "1") }, Config{Quiet: never, Latest: never, open: func() (changeSource, error) {
			n, err := newInotifyReader()
			return &refusing{inotifyReader: n, dir: "b", why: syscall.EACCES}, err
		}})
		s.wantFolders(s.answer(s.confirmed()), "a/b/")
		s.move("a", "c")
		token := s.confirmed()
		s.wantFolders(s.answer(token), "c/b/")
	})
}

// refusing is a changeSource that does not watch folders of one name.
type refusing struct {
	*inotifyReader
	dir string
	why error
}

func (r *refusing) addWatch(dir string) (int, error) {
	if filepath.Base(dir) == r.dir {
		return 0, fmt.Errorf("watch %s: %w", dir, r.why)
	}
	return r.inotifyReader.addWatch(dir)
}

func TestServe_AnswersQueries(t *testing.T) {
	t.Parallel()
	state := filepath.Join(t.TempDir(), strings.Repeat("a long name ", 15)) // longer than the path of a socket may be
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := QueryChanges(t.Context(), state, ""); err == nil {
		t.Error("nobody serves, but somebody answers")
	}
	s := watch(t, func(s *scene) { s.write("d\xff/f", "1") }, Config{Quiet: never, Latest: never})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.w.ServeQueries(ctx, state, nil) }()
	ask := func(since string) *ChangeQuery {
		t.Helper()
		for {
			q, err := QueryChanges(t.Context(), state, since)
			if err == nil {
				return q
			}
			if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	first := ask("")
	if !first.All {
		t.Errorf("answer %+v", first.ChangeAnswer)
	}
	s.must(first.Confirm())
	s.write("d\xff/f", "2")
	second := ask(first.Token)
	s.wantFolders(second.ChangeAnswer, "d\xff")
	s.write("n", "1")
	again, err := second.QueryAgain()
	s.must(err)
	s.wantFolders(again, "")
	second.Close() // without Confirm
	first.Close()
	third := ask(first.Token)
	s.wantFolders(third.ChangeAnswer, "", "d\xff")
	info, err := os.Stat(filepath.Join(state, SocketName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %v %v", info, err)
	}
	cancel()
	s.must(<-served)
	third.Close()
	if _, err := os.Stat(filepath.Join(state, SocketName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stays: %v", err)
	}
}
