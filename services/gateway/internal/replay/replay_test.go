package replay

import (
	"context"
	"errors"
	"testing"
)

// TestSlot_LeavesRoomForOtherTenants tests that replays of one tenant use at most half of the reads, and that a
// tenant without reads is removed.
func TestSlot_LeavesRoomForOtherTenants(t *testing.T) {
	t.Parallel()
	p := New(Config{})
	ended, end := context.WithCancel(t.Context())
	end()
	var releases []func()
	take := func(tenant string, n int) {
		t.Helper()
		for range n {
			release, err := p.acquireReadSlot(t.Context(), tenant)
			if err != nil {
				t.Fatal(err)
			}
			releases = append(releases, release)
		}
	}
	waits := func(tenant string) {
		t.Helper()
		// A select between a free slot and an ended context may take either. If a slot were free, one of many calls
		// would get it.
		for range 100 {
			if release, err := p.acquireReadSlot(ended, tenant); err == nil {
				release()
				t.Fatalf("another read of %s does not wait", tenant)
			} else if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
	}
	take("one", maxTenantReads)
	waits("one")
	take("other", maxReadingReplays-maxTenantReads)
	waits("other")
	waits("third") // all reads of the gateway are in use
	for _, release := range releases {
		release()
	}
	if len(p.tenants) != 0 || len(p.slots) != 0 {
		t.Errorf("%d tenants and %d slots are held", len(p.tenants), len(p.slots))
	}
	take("one", maxTenantReads)
}
