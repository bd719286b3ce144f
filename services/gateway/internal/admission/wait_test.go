package admission

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// newTest returns an Admission that allows streams 100 bytes in total and 60 bytes for one tenant.
func newTest() *Admission {
	return New(Limits{Bytes: 200, TenantBytes: 120, TenantLimits: func(string) events.TenantLimits { return events.TenantLimits{} }})
}

// wait starts a stream of a tenant that waits for n bytes. The channel receives the result of the wait.
func wait(a *Admission, tenant string, n int64) (*Request, <-chan error) {
	r, done := a.BeginStreamData(tenant), make(chan error, 1)
	go func() { done <- r.ReserveBytesBefore(context.Background(), n, time.Now().Add(time.Minute)) }()
	synctest.Wait()
	return r, done
}

func wantCode(t *testing.T, err error, code problem.Code) {
	t.Helper()
	var p *problem.Error
	if !errors.As(err, &p) || p.Code != code {
		t.Errorf("got %v, want %s", err, code)
	}
}

// TestWait_ServesInOrderOfArrival tests that streams of a tenant get bytes in order of arrival, also a small one behind a large
// one, and that streams of another tenant do not wait for them.
func TestWait_ServesInOrderOfArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTest()
		first := a.BeginStreamData("one")
		if err := first.ReserveBytesBefore(t.Context(), 50, time.Now()); err != nil {
			t.Fatal(err)
		}
		large, done := wait(a, "one", 40)
		_, small := wait(a, "one", 5)
		_, last := wait(a, "one", 20)
		if _, other := wait(a, "other", 10); len(other) != 1 || <-other != nil {
			t.Error("another tenant waits")
		}
		want := func(over ...int) {
			t.Helper()
			synctest.Wait()
			if got := []int{len(done), len(small), len(last)}; !slices.Equal(got, over) {
				t.Errorf("the waits that are over: %v, want %v", got, over)
			}
		}
		want(0, 0, 0)
		first.ReleaseBytesBeyond(10)
		want(1, 1, 0)
		large.End()
		want(1, 1, 1)
		if err := errors.Join(<-done, <-small, <-last); err != nil || a.BytesInFlight() != 10+5+20+10 {
			t.Errorf("%d bytes are held, %v", a.BytesInFlight(), err)
		}
	})
}

// TestWait_EndsAtTheDeadline tests that a wait that reaches its deadline returns the error of the limit, holds nothing, and lets
// the requests behind it proceed.
func TestWait_EndsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTest()
		held := a.BeginStreamData("one")
		if err := held.ReserveBytes(50); err != nil {
			t.Fatal(err)
		}
		_, large := wait(a, "one", 40)
		ctx, cancel := context.WithCancelCause(t.Context())
		gone, left := errors.New("the client is gone"), make(chan error, 1)
		go func() { left <- a.BeginStreamData("one").ReserveBytesBefore(ctx, 40, time.Now().Add(time.Hour)) }()
		synctest.Wait()
		time.Sleep(30 * time.Second)
		_, small := wait(a, "one", 10)
		cancel(gone)
		if err := <-left; !errors.Is(err, gone) {
			t.Errorf("got %v", err)
		}
		wantCode(t, <-large, problem.TooMuchInFlight)
		if err := <-small; err != nil {
			t.Errorf("the request behind got %v", err)
		}
		_, all := wait(a, "other", 50)
		wantCode(t, <-all, problem.Overloaded)
		if a.BytesInFlight() != 60 || len(a.waiting) != 0 {
			t.Errorf("%d bytes are held, and %d tenants wait", a.BytesInFlight(), len(a.waiting))
		}
	})
}

// TestHold_LeavesHalfToRequests tests that streams leave half of the bytes to requests.
func TestHold_LeavesHalfToRequests(t *testing.T) {
	a := newTest()
	wantCode(t, a.BeginStreamData("one").ReserveBytes(61), problem.TooMuchInFlight)
	one, other := a.BeginStreamData("one"), a.BeginStreamData("other")
	if err := errors.Join(one.ReserveBytes(60), other.ReserveBytes(40)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, other.ReserveBytes(1), problem.Overloaded)
	request := &Request{admission: a, tenant: "one"}
	if err := request.ReserveBytes(60); err != nil {
		t.Error(err)
	}
	wantCode(t, request.ReserveBytes(1), problem.TooMuchInFlight)
	one.End()
	other.End()
	request.End()
	if a.BytesInFlight() != 0 || a.sent != 0 || len(a.tenants) != 0 {
		t.Errorf("%d bytes are held, %d by streams, %d tenants", a.BytesInFlight(), a.sent, len(a.tenants))
	}
}
