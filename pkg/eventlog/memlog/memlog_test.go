package memlog_test

import (
	"context"
	"errors"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
)

func open(t *testing.T, cfg memlog.Config) *memlog.Log {
	t.Helper()
	l, err := memlog.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLog_PassesTheConformanceSuite(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"one shard": 0, "four shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eventlogtest.Exercise(t, func(t *testing.T) eventlog.Log { return open(t, memlog.Config{Shards: shards}) })
		})
	}
}

func TestNew_RefusesInvalidConfigs(t *testing.T) {
	t.Parallel()
	for _, bad := range []memlog.Config{{Shards: 3}, {Shards: -1}, {Shards: 16}, {MaxCommits: -1}} {
		if _, err := memlog.New(bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

func TestAppend_ReportsAFullLog(t *testing.T) {
	t.Parallel()
	l := open(t, memlog.Config{MaxCommits: 2})
	s := eventlogtest.SessionSubject(0, 1, "full")
	head := eventlogtest.AppendCommits(t, l, s, "full", 2)[1]
	if _, err := l.Append(t.Context(), head, eventlogtest.Draft("x", "x")); !errors.Is(err, eventlog.ErrFull) {
		t.Errorf("append to a full log: %v, want ErrFull", err)
	}
}

func TestSetFaults_InjectsErrors(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l := open(t, memlog.Config{})
	s := eventlogtest.SessionSubject(0, 1, "faults")
	heads := eventlogtest.AppendCommits(t, l, s, "faults", 3)

	l.SetFaults(memlog.Faults{BeforeAppend: func(context.Context, eventlog.Head, events.Draft) error { return eventlog.ErrUnavailable }})
	if _, err := l.Append(ctx, heads[2], eventlogtest.Draft("not stored", "")); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("before: %v", err)
	}
	if last, err := l.Last(ctx, s, eventlog.LeaderOnly); err != nil || last.Seq != heads[2].Seq {
		t.Errorf("after a refused append the head is %d, %v", last.Seq, err)
	}

	l.SetFaults(memlog.Faults{AfterAppend: func(context.Context, eventlog.Head) error { return eventlog.ErrUnavailable }})
	if _, err := l.Append(ctx, heads[2], eventlogtest.Draft("stored", "")); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("after: %v", err)
	}
	l.SetFaults(memlog.Faults{})
	stored, err := l.Append(ctx, heads[2], eventlogtest.Draft("stored", ""))
	if err != nil || stored.Seq != heads[2].Seq+1 {
		t.Errorf("the retry of a commit that was stored: %d, %v", stored.Seq, err)
	}

	// A lagging replica answers with an old head. The guard refuses an append to it, and the leader returns the
	// current head.
	l.SetFaults(memlog.Faults{Behind: func(events.Subject) int { return 2 }})
	stale, err := l.Last(ctx, s, eventlog.AnyReplica)
	if err != nil || stale.Seq != heads[1].Seq {
		t.Fatalf("the replica answers %d, %v", stale.Seq, err)
	}
	var conflict *eventlog.ConflictError
	if _, err := l.Append(ctx, stale, eventlogtest.Draft("stale", "")); !errors.As(err, &conflict) {
		t.Errorf("append to a stale head: %v", err)
	}
	fresh, err := l.Last(ctx, s, eventlog.LeaderOnly)
	if err != nil || fresh.Seq != stored.Seq {
		t.Fatalf("the leader answers %d, %v", fresh.Seq, err)
	}
	if _, err := l.Append(ctx, fresh, eventlogtest.Draft("fresh", "")); err != nil {
		t.Error(err)
	}

	l.SetFaults(memlog.Faults{BeforeRead: func(context.Context) error { return eventlog.ErrUnavailable }})
	if _, err := l.Last(ctx, s, eventlog.AnyReplica); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("last: %v", err)
	}
	if _, err := l.CommitAt(ctx, eventlog.Position{Seq: 1}); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("at: %v", err)
	}
}
