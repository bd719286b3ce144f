package versions_test

import (
	"encoding/json"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// drawCommand draws any command. There are only few digests and tags, so that commands collide.
func drawCommand(t *rapid.T) versions.Command {
	some := rapid.IntRange(1, 6)
	tags := []string{"a", "b", "c", events.LatestTag}
	switch rapid.IntRange(0, 9).Draw(t, "command") {
	case 0, 1:
		version := rapid.SampledFrom([]string{"", "a", "b", events.LatestTag, hex(1), hex(2), hex(3), hex(99)}).Draw(t, "tagged")
		return tag(version, rapid.SampledFrom(tags).Draw(t, "tag"))
	case 2:
		return remove(hex(some.Draw(t, "removed")))
	case 3:
		return remove("")
	case 4: // many digests, so that old versions are dropped
		return apply(rapid.IntRange(1, 100_000).Draw(t, "new"))
	}
	return apply(some.Draw(t, "applied"), rapid.SliceOfN(rapid.SampledFrom(tags), 0, 3).Draw(t, "tags")...)
}

// fold applies commits that begin at a sequence.
func fold(s versions.State, from uint64, commits [][]events.Event) versions.State {
	for i, list := range commits {
		seq := from + uint64(i) + 1
		s = versions.Fold(s, commitID(seq), list).WithCommitSeq(seq)
	}
	return s
}

func TestDecide_Properties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var h history
		if rapid.Bool().Draw(t, "long") { // the history begins near the limit
			for i := range versions.MaxVersions - 2 {
				if err := h.do(apply(1000 + i)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "commands") {
			before, stored := h.state, text(t, h.state)
			c := drawCommand(t)
			n := len(h.commits)
			err := h.do(c)
			if text(t, before) != stored {
				t.Fatal("the state before was changed")
			}
			if err != nil && (len(h.commits) != n || text(t, h.state) != stored) {
				t.Fatalf("%+v was refused with %v, and changed something", c, err)
			}
			checkInvariants(t, h.state)
			checkKept(t, before, h.state, c)
			checkRepeated(t, h, c, err)
		}
		cut := rapid.IntRange(0, len(h.commits)).Draw(t, "cut")
		first := fold(versions.State{}, 0, h.commits[:cut])
		var loaded versions.State
		if err := json.Unmarshal([]byte(text(t, first)), &loaded); err != nil {
			t.Fatal(err)
		}
		for name, s := range map[string]versions.State{"in two": first, "in two, stored between": loaded} {
			if got := text(t, fold(s, uint64(cut), h.commits[cut:])); got != text(t, h.state) {
				t.Fatalf("folded %s it is\n%s\nat once\n%s", name, got, text(t, h.state))
			}
		}
	})
}

// checkInvariants checks what holds for every state.
func checkInvariants(t *rapid.T, s versions.State) {
	if len(s.Versions) > versions.MaxVersions || len(s.Tags) > versions.MaxTags || len(s.Commands) > 16 {
		t.Fatalf("%d versions, %d tags, %d commands", len(s.Versions), len(s.Tags), len(s.Commands))
	}
	seen := map[string]bool{}
	live := map[string]bool{}
	for _, v := range s.Versions {
		if seen[v.Digest] || v.At == 0 {
			t.Fatalf("version %s is listed twice, or has no position in the log", v.Digest)
		}
		seen[v.Digest], live[v.Digest] = true, !v.Removed
	}
	if s.Removed && len(s.Tags) > 0 {
		t.Fatalf("the entry is removed and has tags %v", s.Tags)
	}
	for tag, digest := range s.Tags {
		if !live[digest] {
			t.Fatalf("tag %s names %s, which does not exist", tag, digest)
		}
		if got, ok := s.Resolve(tag); !ok || got != digest {
			t.Fatalf("tag %s resolves to %s, %v", tag, got, ok)
		}
	}
	if _, ok := s.Tags[events.LatestTag]; ok == (s.Removed || len(s.Versions) == 0) {
		t.Fatalf("removed %v, %d versions, latest %v", s.Removed, len(s.Versions), ok)
	}
}

// checkKept checks that a version keeps its content and its position, unless it was removed and applied again, or
// dropped as the oldest one.
func checkKept(t *rapid.T, before, after versions.State, c versions.Command) {
	var order []string
	for _, v := range before.Versions {
		order = append(order, v.Digest)
		a, isApply := c.(versions.ApplyVersion)
		back := v.Removed && isApply && a.Version == v.Digest
		i := slices.IndexFunc(after.Versions, func(w versions.Version) bool { return w.Digest == v.Digest })
		switch {
		case i < 0 && !after.Dropped:
			t.Fatalf("version %s is gone", v.Digest)
		case i >= 0 && !back && (after.Versions[i].At != v.At || v.Removed && !after.Versions[i].Removed):
			t.Fatalf("version %+v became %+v", v, after.Versions[i])
		}
		if back {
			order = order[:len(order)-1]
		}
	}
	last := -1
	for _, d := range order {
		if i := slices.IndexFunc(after.Versions, func(w versions.Version) bool { return w.Digest == d }); i >= 0 {
			if i < last {
				t.Fatalf("version %s moved before an older one", d)
			}
			last = i
		}
	}
}

// checkRepeated delivers the command once more and checks that it changes nothing.
func checkRepeated(t *rapid.T, h history, c versions.Command, refused error) {
	if len(h.commits) > 0 && !h.state.HasCommand(commitID(h.seq)) {
		t.Fatal("the last commit is not remembered")
	}
	list, err := versions.Decide(h.state, c)
	if _, isRemove := c.(versions.RemoveEntry); isRemove || refused != nil {
		if err == nil {
			t.Fatalf("%+v, repeated, decided %+v", c, list)
		}
		return
	}
	if t2, isTag := c.(versions.MoveTag); isTag && t2.Tag == events.LatestTag && t2.Version != hex(1) {
		return // the tag may name another version by now, but the state still knows the commit
	}
	if err != nil || len(list) > 0 {
		t.Fatalf("%+v, repeated, decided %+v, %v", c, list, err)
	}
}
