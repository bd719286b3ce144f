package session_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	service "github.com/spoolhq/spool/services/session"
)

// replica is a log with a replica that stopped following the leader. The replica answers reads with eventlog.AnyReplica.
type replica struct {
	eventlog.Log
	mu    sync.Mutex
	heads map[events.Subject]eventlog.Head // heads that the replica holds
}

// Last implements eventlog.Reader.
func (r *replica) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	r.mu.Lock()
	head, stale := r.heads[s]
	r.mu.Unlock()
	if stale && f == eventlog.AnyReplica {
		return head, nil
	}
	return r.Log.Last(ctx, s, f)
}

// freeze makes the replica stop at the present state of a session.
func (r *replica) freeze(t *testing.T, sid string) {
	for _, s := range []events.Subject{events.LifeSubject("default", sid), events.RunSubject("default", sid)} {
		head, err := r.Log.Last(t.Context(), s, eventlog.LeaderOnly)
		must(t, err)
		r.mu.Lock()
		r.heads[s] = head
		r.mu.Unlock()
	}
}

// TestControl_IsDecidedFromTheLeaderBeforeItIsAnswered tests that a control takes effect even if a lagging replica
// makes it look as if it changed nothing.
func TestControl_IsDecidedFromTheLeaderBeforeItIsAnswered(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	log := &replica{Log: s.log, heads: map[events.Subject]eventlog.Head{}}
	svc, err := service.New(service.Config{}, service.Deps{NATS: s.nc, Log: log, Logger: slog.New(slog.DiscardHandler), Copy: "one"})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	awaitReady(t, svc.Ready(), done)
	for _, c := range []struct {
		name   string
		typ    command.Type
		before command.Type // sent after the post and before the replica stops; with "" the replica stops before the post
		want   events.Payload
	}{
		{"an interrupt of a query that the replica has not heard of", command.TypeInterrupt, "", events.InterruptRequested{}},
		{"a cancel of a query that the replica has not heard of", command.TypeCancel, "", events.CancelRequested{}},
		{"a pause of a query that the replica has not heard of", command.TypePause, "", events.PauseRequested{}},
		{"a terminate of a query that the replica has not heard of", command.TypeTerminate, "", events.TerminateRequested{}},
		{"a resume after a pause that the replica has not heard of", command.TypeResume, command.TypePause, events.ResumeRequested{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			sid := s.create(events.Options{})
			if c.before == "" {
				log.freeze(t, sid)
			}
			exe := s.post(sid)
			if c.before != "" {
				log.freeze(t, sid)
				s.mustSend(c.before, sid, exe)
			}
			s.mustSend(c.typ, sid, exe)
			var found bool
			for _, e := range s.history(sid) {
				found = found || e.Type() == c.want.EventType() && e.ExecutionID == exe
			}
			if !found {
				t.Fatalf("%s was answered and is not in the log: %v", c.typ, s.history(sid))
			}
		})
	}
}
