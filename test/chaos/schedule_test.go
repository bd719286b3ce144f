package main

import "testing"

// TestSchedule_IsDecidedByItsSeed tests that the same seed gives the same faults, another seed other faults, that every
// part is killed and frozen, that NATS stalls while each service starts, and that all session services are frozen.
func TestSchedule_IsDecidedByItsSeed(t *testing.T) {
	t.Parallel()
	const parts, faults = 11, 500
	a, b, c := newFaultSchedule(7, parts), newFaultSchedule(7, parts), newFaultSchedule(8, parts)
	hit, same, sessions := map[int]map[faultKind]int{}, 0, 0
	for range faults {
		f := a.next()
		if g := b.next(); g != f {
			t.Fatalf("the same seed gave %+v and %+v", f, g)
		}
		if c.next() == f {
			same++
		}
		if hit[f.part] == nil {
			hit[f.part] = map[faultKind]int{}
		}
		if f.kind == faultFrozenSessions {
			sessions++
			continue
		}
		hit[f.part][f.kind]++
	}
	if same > faults/10 {
		t.Errorf("%d of %d faults of another seed are the same", same, faults)
	}
	for part := range parts {
		if hit[part][faultKill] == 0 || hit[part][faultFreeze] == 0 || (hit[part][faultStalledStart] > 0) != (part >= firstService) {
			t.Errorf("faults of part %d by kind: %v", part, hit[part])
		}
	}
	if sessions == 0 {
		t.Error("the session services were never frozen together")
	}
}
