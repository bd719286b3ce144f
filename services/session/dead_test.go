package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	service "github.com/spoolhq/spool/services/session"
)

// giveUpJobs consumes jobs like an executor and gives each up as poison, until the test ends or stop is called.
func (s *stack) giveUpJobs(reason string) (stop func()) {
	s.t.Helper()
	dead, err := bus.NewPublisher(bus.PublisherConfig{JetStream: s.js, Deduplicate: true})
	must(s.t, err)
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: dead, Logger: slog.New(slog.DiscardHandler)})
	must(s.t, err)
	cfg, topic, err := bus.ConfigForDurable(s.js, topology.ProviderJobsConsumer("local"))
	must(s.t, err)
	sub, err := bus.NewSubscriber(cfg)
	must(s.t, err)
	must(s.t, router.Handle("jobs", topic, sub, func(context.Context, *message.Message) error { return bus.Poison(errors.New(reason)) }))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- router.Run(ctx) }()
	awaitReady(s.t, router.Running(), done)
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			must(s.t, <-done)
		}
	}
	s.t.Cleanup(stop)
	return stop
}

// TestDeadJob_FailsItsExecution tests that an execution whose job was given up fails, and that the messages after it
// are executed.
func TestDeadJob_FailsItsExecution(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", service.Config{})
	sid := s.create(events.Options{})
	first, second := s.post(sid), s.post(sid)
	stop := s.giveUpJobs("nobody can do this")
	s.await(sid, "with both executions ended", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(second) && l.Run.Phase == run.Failed })
	stop()
	for _, e := range s.history(sid) {
		f, failed := e.Data.(events.ExecutionFailed)
		if failed && (f.Code != "JOB_DEAD" || !strings.Contains(f.Message, "nobody can do this")) {
			t.Errorf("%s failed with %+v", e.ExecutionID, f)
		}
	}
	s.checkOrder(sid, []string{first, second})
	s.checkLog(sid)
}

// letters returns the sequences of the dead letters, oldest first.
func (s *stack) letters() (list []uint64) {
	s.t.Helper()
	stream, err := s.js.Stream(s.t.Context(), topology.StreamDead)
	must(s.t, err)
	for after := uint64(0); ; {
		msg, err := stream.GetMsg(s.t.Context(), after+1, jetstream.WithGetMsgSubject(topology.DeadFilter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return list
		}
		must(s.t, err)
		after = msg.Sequence
		list = append(list, after)
	}
}

// sendDeadLetter sends a command about a dead letter.
func (s *stack) sendDeadLetter(typ command.Type, tenant string, letter uint64) command.Answer {
	s.t.Helper()
	raw, err := json.Marshal(command.DeadLetter{Sequence: letter})
	must(s.t, err)
	c := command.Command{Type: typ, ID: id(events.KindCommand), Tenant: tenant, Actor: events.Actor{Kind: "user"}, Body: raw}
	a, err := s.request(c, "dead")
	must(s.t, err)
	return a
}

// TestDeadLetter_RetryAndDrop tests that a retry publishes a new job for the work that is due, also within the
// duplicate window of the stream. A letter of a deleted session or of a command is refused, and a letter of another
// tenant is not found.
func TestDeadLetter_RetryAndDrop(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", service.Config{})
	w := s.worker()
	sid := s.create(events.Options{})
	first := s.post(sid)
	w.runJob("of the query")
	s.await(sid, "idle with its sandbox", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(first) && l.Run.Sandbox.ID != "" })
	s.mustSend(command.TypeSyncWorkspace, sid, "")
	// Give the job up like the Router.
	msg, err := w.jobs.Next(jetstream.FetchMaxWait(within))
	must(t, err)
	letter := nats.NewMsg(topology.DeadSubject(msg.Subject()))
	letter.Data = msg.Data()
	letter.Header.Set(topology.HeaderDeadSubject, msg.Subject())
	letter.Header.Set(topology.HeaderDeadReason, "it could not be done")
	_, err = s.js.PublishMsg(t.Context(), letter)
	must(t, err)
	must(t, msg.TermWithReason("it could not be done"))
	at := s.letters()[0]
	if a := s.sendDeadLetter(command.TypeRetryDeadLetter, "other", at); a.Error != nil || len(s.letters()) != 1 {
		t.Fatalf("another tenant's retry: %+v, letters %v", a, s.letters())
	}
	if a := s.sendDeadLetter(command.TypeRetryDeadLetter, "default", at); a.Error != nil || len(s.letters()) != 0 {
		t.Fatalf("retry: %+v, letters %v", a, s.letters())
	}
	w.runJob("of the retry")
	s.await(sid, "synced", func(l *eventlog.SessionState) bool { return l.Run.Synced == 1 })

	of := topology.CommandSubject(topology.ServiceSession, "default", sid)
	_, err = s.js.Publish(t.Context(), topology.DeadSubject(of), []byte("{"))
	must(t, err)
	if a := s.sendDeadLetter(command.TypeRetryDeadLetter, "default", s.letters()[0]); a.Error == nil || a.Error.Code != "DEAD_LETTER_FINAL" || a.Error.Field != "id" {
		t.Errorf("retry of a command: %+v", a)
	}
	if a := s.sendDeadLetter(command.TypeDropDeadLetter, "default", s.letters()[0]); a.Error != nil || len(s.letters()) != 0 {
		t.Errorf("drop: %+v, letters %v", a, s.letters())
	}
	_, err = s.js.PublishMsg(t.Context(), letter)
	must(t, err)
	s.mustSend(command.TypeDeleteSession, sid, "")
	if a := s.sendDeadLetter(command.TypeRetryDeadLetter, "default", s.letters()[0]); a.Error == nil || a.Error.Code != "SESSION_NOT_FOUND" || a.Error.Field != "sessionId" || len(s.letters()) != 1 {
		t.Errorf("retry for a deleted session: %+v, letters %v", a, s.letters())
	}
}
