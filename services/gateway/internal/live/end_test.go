package live_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// addEnd adds the event that ends an execution.
func (s *storedSession) addEnd(execution string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seq := len(s.events) + 1
	s.events = append(s.events, reads.StoredEvent{Seq: uint32(seq), Type: "execution_completed", JSON: fmt.Appendf(nil,
		`{"seq":%d,"position":"0-1","type":"execution_completed","time":"2026-01-02T03:04:05Z","sessionId":"s","executionId":%q,"source":"server","data":{}}`, seq, execution)})
}

// runHub runs a Hub with a source until the test ends. announce makes its feeds read the source.
func runHub(t *testing.T, source *storedSession, session string, ring int) (h *live.Hub, announce func(), stop func()) {
	t.Helper()
	nc := natstest.Conn(t, natstest.Run(t))
	h = live.NewHub(live.Config{
		ReadModels: source, NATS: nc, Logger: natstest.Logger(t), Admission: admission.New(admission.Limits{Bytes: 64 << 20, TenantBytes: 64 << 20}),
		CheckEvery: time.Hour, RingEvents: ring,
	})
	ctx, cancel := context.WithCancel(t.Context())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- h.Run(ctx, func() { close(started) }) }()
	<-started
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	return h, func() { announceTip(t, nc, source, session) }, stop
}

// announceTip publishes the tip of a session without its events.
func announceTip(t *testing.T, nc *nats.Conn, source *storedSession, session string) {
	t.Helper()
	tip, err := source.Tip(t.Context(), "default", session)
	if err == nil {
		err = nc.Publish(events.LiveSubject("default", session), fmt.Appendf(nil, `{"sessionId":%q,"tip":%d,"events":[]}`, session, tip.Seq))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestAwaitEnd_ReturnsTheEndOfItsExecution tests that AwaitExecutionEnd skips other events and the ends of other executions, and
// leaves the cursor before the end.
func TestAwaitEnd_ReturnsTheEndOfItsExecution(t *testing.T) {
	t.Parallel()
	source, session := &storedSession{}, events.DeriveID(events.KindSession, "s")
	source.add()
	h, announce, stop := runHub(t, source, session, 0)
	defer stop()
	r, err := h.JoinTip(t.Context(), "default", nil, session)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		for _, execution := range []string{"", "exe_other", "", "exe_mine", "exe_later"} {
			if execution == "" {
				source.add()
			} else {
				source.addEnd(execution)
			}
			announce()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if seq, err := r.AwaitExecutionEnd(ctx, "exe_mine"); seq != 5 || err != nil || r.Cursor() != 4 {
		t.Errorf("got %d, %v with cursor %d, want the end 5 with cursor 4", seq, err, r.Cursor())
	}
}

// TestAwaitEnd_ReportsMissedEvents tests that AwaitExecutionEnd returns 0 if the ring dropped events after the cursor, and the cause
// of a context that ends.
func TestAwaitEnd_ReportsMissedEvents(t *testing.T) {
	t.Parallel()
	source, session := &storedSession{}, events.DeriveID(events.KindSession, "s")
	source.add()
	h, announce, stop := runHub(t, source, session, 2)
	defer stop()
	r, err := h.JoinTip(t.Context(), "default", nil, session)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	source.addEnd("exe_mine")
	for range 5 {
		source.add()
	}
	announce()
	for deadline := time.Now().Add(time.Minute); r.Tip() < 7; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the feed is at %d", r.Tip())
		}
	}
	if seq, err := r.AwaitExecutionEnd(t.Context(), "exe_mine"); seq != 0 || err != nil || r.Cursor() != 7 {
		t.Errorf("got %d, %v with cursor %d, want 0 with the cursor at the last event", seq, err, r.Cursor())
	}
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := r.AwaitExecutionEnd(ctx, "exe_mine"); !errors.Is(err, why) {
		t.Errorf("got %v, want the cause of the context", err)
	}
}

// TestUntilStop_EndsWithTheHub tests that a context of ContextUntilStop ends when the Hub stops, and a Reader with the same error.
func TestUntilStop_EndsWithTheHub(t *testing.T) {
	t.Parallel()
	source, session := &storedSession{}, events.DeriveID(events.KindSession, "s")
	source.add()
	h, _, stop := runHub(t, source, session, 0)
	r, err := h.JoinTip(t.Context(), "default", nil, session)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := h.ContextUntilStop(t.Context())
	defer cancel()
	if ctx.Err() != nil {
		t.Fatalf("the context of a running Hub has ended: %v", context.Cause(ctx))
	}
	stop()
	<-ctx.Done()
	_, err = r.AwaitExecutionEnd(t.Context(), "exe_mine")
	if err == nil || !errors.Is(context.Cause(ctx), err) {
		t.Errorf("the context ended with %v, the Reader with %v", context.Cause(ctx), err)
	}
}
