package main

import "testing"

// TestSchedule_IsDecidedByItsSeed tests that the same seed gives the same faults, another seed other faults, and that
// every part is killed and frozen.
func TestSchedule_IsDecidedByItsSeed(t *testing.T) {
	t.Parallel()
	const parts, faults = 11, 500
	a, b, c := newFaultSchedule(7, parts), newFaultSchedule(7, parts), newFaultSchedule(8, parts)
	hit, same := map[int]map[bool]int{}, 0
	for range faults {
		f := a.next()
		if g := b.next(); g != f {
			t.Fatalf("the same seed gave %+v and %+v", f, g)
		}
		if c.next() == f {
			same++
		}
		if hit[f.part] == nil {
			hit[f.part] = map[bool]int{}
		}
		hit[f.part][f.freeze]++
	}
	if same > faults/10 {
		t.Errorf("%d of %d faults of another seed are the same", same, faults)
	}
	for part := range parts {
		if hit[part][true] == 0 || hit[part][false] == 0 {
			t.Errorf("part %d was killed or frozen: %v", part, hit[part])
		}
	}
}
