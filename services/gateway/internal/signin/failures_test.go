package signin

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// failuresTest is a Failures with a clock that the test sets.
type failuresTest struct {
	*Failures
	t     *testing.T
	clock time.Time
}

func newFailuresTest(t *testing.T) *failuresTest {
	f := &failuresTest{t: t, clock: time.Unix(1e9, 0)}
	f.Failures = NewFailures(func() time.Time { return f.clock })
	return f
}

// refuse makes a sign-in of an address that is refused.
func (f *failuresTest) refuse(address string) {
	f.t.Helper()
	end, err := f.Begin(address)
	if err != nil {
		f.t.Fatal(err)
	}
	end(true)
}

// wait returns how long an address must wait, or 0 if it may sign in.
func (f *failuresTest) wait(address string) time.Duration {
	f.t.Helper()
	end, err := f.Begin(address)
	if err == nil {
		end(false)
		return 0
	}
	var p *problem.Error
	if !errors.As(err, &p) || p.Code != problem.RateLimited {
		f.t.Fatalf("got %v", err)
	}
	return p.RetryAfter
}

// TestFailures_RefusesUntilTimeHasPassed tests that an address is refused after its burst, for as long as Retry-After says.
func TestFailures_RefusesUntilTimeHasPassed(t *testing.T) {
	f := newFailuresTest(t)
	for range failureBurst {
		f.refuse("192.0.2.1")
	}
	wait := f.wait("192.0.2.1")
	if wait != failureInterval || f.wait("192.0.2.2") != 0 {
		t.Fatalf("the address must wait for %s, and another one for %s", wait, f.wait("192.0.2.2"))
	}
	f.clock = f.clock.Add(wait)
	if f.wait("192.0.2.1") != 0 {
		t.Error("the address is refused after its wait")
	}
}

// TestFailures_CountSignInsThatAreBeingChecked tests that many sign-ins at once are limited before the first one is refused,
// and that those which succeed do not count afterwards.
func TestFailures_CountSignInsThatAreBeingChecked(t *testing.T) {
	f := newFailuresTest(t)
	var ends []func(bool)
	for range failureBurst {
		end, err := f.Begin("192.0.2.1")
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, end)
	}
	if f.wait("192.0.2.1") == 0 {
		t.Error("one more sign-in is checked")
	}
	for _, end := range ends {
		end(false)
	}
	if f.wait("192.0.2.1") != 0 || len(f.addresses) != 0 {
		t.Errorf("%d addresses are kept", len(f.addresses))
	}
}

// TestFailures_ForgetAddressesWithoutRecentFailures tests that memory is bounded, and that addresses with recent failures are
// kept before others.
func TestFailures_ForgetAddressesWithoutRecentFailures(t *testing.T) {
	f := newFailuresTest(t)
	address := func(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255) }
	for i := range maxFailureAddresses - 1 {
		f.refuse(address(i))
	}
	f.clock = f.clock.Add(failureInterval)
	for range failureBurst {
		f.refuse("192.0.2.1")
	}
	f.refuse("192.0.2.2")
	if f.wait("192.0.2.1") == 0 || len(f.addresses) != 2 {
		t.Errorf("%d addresses are kept, want those with recent failures", len(f.addresses))
	}
	for i := range 3 * maxFailureAddresses {
		f.refuse(address(i))
		if len(f.addresses) > maxFailureAddresses {
			t.Fatalf("%d addresses are in memory", len(f.addresses))
		}
	}
}
