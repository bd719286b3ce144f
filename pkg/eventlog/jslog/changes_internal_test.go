package jslog

import (
	"maps"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func infoOf(leader string, msgs, last uint64) jetstream.StreamInfo {
	return jetstream.StreamInfo{
		Created: time.Unix(1, 0), Cluster: &jetstream.ClusterInfo{Leader: leader}, State: jetstream.StreamState{Msgs: msgs, LastSeq: last},
	}
}

// TestCount_IsExact tests that a count is refused if it may be one of another sequence than stated.
func TestCount_IsExact(t *testing.T) {
	t.Parallel()
	created := func(i jetstream.StreamInfo, at time.Time) jetstream.StreamInfo { i.Created = at; return i }
	for _, c := range []struct {
		name     string
		subjects map[string]uint64
		first    jetstream.StreamInfo
		second   jetstream.StreamInfo
		want     bool
	}{
		{"nothing happened meanwhile", map[string]uint64{"a": 3, "b": 2}, infoOf("s1", 5, 9), infoOf("s1", 5, 9), true},
		{"messages were stored after the count", map[string]uint64{"a": 3, "b": 2}, infoOf("s1", 5, 9), infoOf("s1", 7, 11), true},
		{"a message was stored before the count", map[string]uint64{"a": 4, "b": 2}, infoOf("s1", 5, 9), infoOf("s1", 6, 10), false},
		{"one was stored and one removed before the count", map[string]uint64{"a": 4, "b": 1}, infoOf("s1", 5, 9), infoOf("s1", 5, 10), false},
		{"another leader answered", map[string]uint64{"a": 3, "b": 2}, infoOf("s1", 5, 9), infoOf("s2", 5, 9), false},
		{"the leader lost its end", map[string]uint64{"a": 3, "b": 2}, infoOf("s1", 5, 9), infoOf("s1", 4, 8), false},
		{"the stream was replaced", map[string]uint64{"a": 3, "b": 2}, infoOf("s1", 5, 9), created(infoOf("s1", 5, 9), time.Unix(2, 0)), false},
	} {
		if got := (&subjectCounts{stream: c.first, at: c.first.State.LastSeq, subjects: c.subjects}).isExact(&c.second); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestCount_ChangedSince tests that subjects are named only if the counts show all that changed.
func TestCount_ChangedSince(t *testing.T) {
	t.Parallel()
	earlier := &subjectCounts{stream: infoOf("s1", 6, 9), at: 9, subjects: map[string]uint64{"a": 3, "b": 2, "c": 1}}
	for _, c := range []struct {
		name     string
		at       uint64
		subjects map[string]uint64
		want     []string // nil if the counts do not show it
	}{
		{"appends", 13, map[string]uint64{"a": 5, "b": 2, "c": 1, "new": 2}, []string{"a", "new"}},
		{"nothing", 9, map[string]uint64{"a": 3, "b": 2, "c": 1}, []string{}},
		{"a removed subject", 10, map[string]uint64{"a": 4, "b": 2}, []string{"a"}},
		{"a removal and an append of one subject", 11, map[string]uint64{"a": 4, "b": 2, "c": 1}, nil},
		{"a subject that grew less than it was appended to", 12, map[string]uint64{"a": 5, "b": 2, "c": 1}, nil},
		{"a shorter stream", 8, map[string]uint64{"a": 2, "b": 2, "c": 1}, nil},
	} {
		now := &subjectCounts{stream: infoOf("s1", 0, c.at), at: c.at, subjects: c.subjects}
		got, ok := now.changedSince(earlier)
		if ok != (c.want != nil) || ok && !maps.Equal(set(got), set(c.want)) {
			t.Errorf("%s: %v, %v, want %v", c.name, got, ok, c.want)
		}
	}
	replaced := &subjectCounts{stream: infoOf("s1", 0, 10), at: 10, subjects: map[string]uint64{"a": 4, "b": 2, "c": 1}}
	replaced.stream.Created = time.Unix(2, 0)
	if got, ok := replaced.changedSince(earlier); ok {
		t.Errorf("a replaced stream: %v", got)
	}
}

func set(list []string) map[string]bool {
	m := map[string]bool{}
	for _, s := range list {
		m[s] = true
	}
	return m
}

// TestWorthCounting tests the choice between counting and reading headers.
func TestWorthCounting(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name              string
		last, after, subs uint64
		want              bool
	}{
		{"no changes", 100, 100, 0, false},
		{"more changes than subjects", 12_200, 200, 200, true},
		{"few changes of many subjects", 1_000_060, 1_000_000, 40_000, false},
		{"too many subjects", 1_000_000, 0, 200_000, false},
		{"a stream that became shorter", 50, 100, 1, false},
	} {
		if got := isCountingCheaper(jetstream.StreamState{LastSeq: c.last, NumSubjects: c.subs}, c.after); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
