package events_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestPartitioning_SubjectsRoundTripAndGroupsAreConsistent(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, 2, 4, 8, 16, 32, 64} {
		p := events.Partitioning(n)
		if n > 0 && (p.PartitionCount() != n || p.GroupCount() != n) {
			t.Errorf("%d partitions: count %d, %d groups", n, p.PartitionCount(), p.GroupCount())
		}
		for i := range 200 {
			s := events.LifeSubject("acme", events.DeriveID(events.KindSession, fmt.Sprint(i)))
			if got, err := p.ParseSubject(p.Subject(s)); err != nil || got != s {
				t.Fatalf("%d partitions: %s is parsed as %v, %v", n, p.Subject(s), got, err)
			}
			if g := p.GroupOfID(s.ID); g != p.GroupOfPartition(p.PartitionOf(s.ID)) || !slices.Contains(p.PartitionsInGroup(g), p.PartitionOf(s.ID)) {
				t.Fatalf("%d partitions: %s is in partition %d and in group %d", n, s.ID, p.PartitionOf(s.ID), g)
			}
			for wrong := range p.PartitionCount() {
				name := "ev." + events.PartitionToken(wrong) + ".acme." + s.ID + ".life"
				if _, err := p.ParseSubject(name); (err == nil) != (wrong == p.PartitionOf(s.ID)) {
					t.Fatalf("%d partitions: parse %s: %v", n, name, err)
				}
			}
		}
	}
}

// A log of an earlier build keeps its subjects and its groups.
func TestPartitioning_WithoutARecordedNumberKeepsSubjects(t *testing.T) {
	t.Parallel()
	s := events.LifeSubject("acme", events.DeriveID(events.KindSession, "recorded"))
	p := events.Partitioning(0)
	if p.PartitionCount() != 64 || p.GroupCount() != 8 || p.Subject(s) != s.String() {
		t.Errorf("%d partitions in %d groups, %s", p.PartitionCount(), p.GroupCount(), p.Subject(s))
	}
	if got, want := p.PartitionsInGroup(3), []int{3, 11, 19, 27, 35, 43, 51, 59}; !slices.Equal(got, want) {
		t.Errorf("group 3 has partitions %v, want %v", got, want)
	}
}

func TestCheckPartitions(t *testing.T) {
	t.Parallel()
	for n := -2; n <= 130; n++ {
		want := slices.Contains([]int{1, 2, 4, 8, 16, 32, 64}, n)
		if err := events.CheckPartitions(n); (err == nil) != want {
			t.Errorf("%d: %v", n, err)
		}
	}
}
