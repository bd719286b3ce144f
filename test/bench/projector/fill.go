package projector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// firstEventTime is the time of the first event in the log that the benchmark writes.
var firstEventTime = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// sessionWriter appends commits to one session. It holds the hash of the last commit of each subject, to which the next
// commit is chained.
type sessionWriter struct {
	tenant, id string
	prev       map[events.Aspect]string
	n          int
}

// fillLog publishes the commits of a number of sessions with the given number of turns in all, asynchronously and
// without guards. Their order is that of a running system: the first turn of each session, then the second one, and so
// on.
func (t *testbed) fillLog(ctx context.Context, sessions, turns int) error {
	writers := make([]*sessionWriter, sessions)
	for i := range writers {
		writers[i] = &sessionWriter{tenant: "default", id: events.DeriveID(events.KindSession, "bench", fmt.Sprint(i)), prev: map[events.Aspect]string{}}
		if err := t.publishCommit(ctx, writers[i], events.Life, "", events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local"}); err != nil {
			return err
		}
	}
	for n := range turns {
		if err := t.appendTurn(ctx, writers[n%sessions], n); err != nil {
			return err
		}
	}
	select {
	case <-t.js.PublishAsyncComplete():
	case <-ctx.Done():
		return ctx.Err()
	}
	return t.setGroupEnds(ctx, writers)
}

// appendTurn publishes the n-th turn of the log, with some text and three tool calls: 23 events in 11 commits.
func (t *testbed) appendTurn(ctx context.Context, w *sessionWriter, n int) error {
	x := events.DeriveID(events.KindExecution, w.id, fmt.Sprint(n))
	block := func(name string) string { return events.DeriveID(events.KindBlock, x, name) }
	text := events.Block{ID: block("text"), Kind: events.KindAssistantText, Status: events.StatusPending}
	whole := text
	whole.Status, whole.Content = events.StatusComplete, strings.Repeat("All work and no play makes an agent a dull one. ", 8)
	type commit struct {
		aspect events.Aspect
		list   []events.Payload
	}
	commits := []commit{
		{events.Life, []events.Payload{events.MessageAccepted{BlockID: block("message"), Content: "Write a program that prints the first hundred primes, and run it."}, events.ExecutionDispatched{}}},
		{events.Run, []events.Payload{events.ExecutionClaimed{Epoch: 1, Executor: "xtr_bench"}, events.ExecutionStarted{Attempt: 1}}},
		{events.Run, []events.Payload{events.BlockStart{Block: text}}},
		{events.Run, []events.Payload{events.BlockComplete{Block: whole}, events.MetadataUpdate{Usage: events.Usage{InputTokens: 100, OutputTokens: 200}, Model: "model"}}},
	}
	for i := range 3 {
		call := events.Block{ID: block(fmt.Sprint("call", i)), Kind: events.KindToolUse, Status: events.StatusPending, ToolName: "run_code", ToolUseID: block(fmt.Sprint("use", i))}
		done := call
		done.Status, done.Input = events.StatusComplete, json.RawMessage(`{"language":"python","code":"print([n for n in range(2, 542) if all(n % d for d in range(2, n))])"}`)
		result := events.Block{ID: block(fmt.Sprint("result", i)), Kind: events.KindToolResult, Status: events.StatusComplete, ToolUseID: call.ToolUseID, Output: strings.Repeat("2 3 5 7 11 13 17 19 ", 10), DurationMs: 40}
		commits = append(commits,
			commit{events.Run, []events.Payload{events.BlockStart{Block: call}, events.BlockComplete{Block: done}}},
			commit{events.Run, []events.Payload{events.BlockStart{Block: result}, events.Log{Level: "info", Stream: "runner", Message: "exit code 0"}}})
	}
	commits = append(commits, commit{events.Run, []events.Payload{
		events.MetadataUpdate{Usage: events.Usage{InputTokens: 300, OutputTokens: 400}, Model: "model"},
		events.Log{Level: "info", Stream: "runner", Message: "the turn ended"},
		events.TranscriptWritten{AgentSessionID: "bench"},
		events.ExecutionCompleted{DurationMs: 900, Usage: events.Usage{InputTokens: 300, OutputTokens: 400}, Result: "done"},
	}})
	for _, c := range commits {
		if err := t.publishCommit(ctx, w, c.aspect, x, c.list...); err != nil {
			return err
		}
	}
	if t.snapshot == "" {
		return nil
	}
	return t.publishCommit(ctx, w, events.Run, "", events.WorkspaceSynced{Snapshot: t.snapshot})
}

// publishCommit publishes a commit with the events of list to the life or run subject of the writer's session.
// execution is the id of the events' execution; "" for none.
func (t *testbed) publishCommit(ctx context.Context, w *sessionWriter, aspect events.Aspect, execution string, list ...events.Payload) error {
	subject := events.Subject{Tenant: w.tenant, ID: w.id, Aspect: aspect}
	d := events.Draft{Actor: events.Actor{Kind: "executor", ID: "xtr_bench"}, Epoch: 1}
	for _, p := range list {
		w.n++
		e := events.Event{ID: events.DeriveID(events.KindEvent, w.id, fmt.Sprint(w.n)), Time: firstEventTime.Add(time.Duration(t.events) * time.Millisecond), ExecutionID: execution, Source: events.FromRunner, Data: p}
		if execution != "" {
			e.ConversationID = events.MainConversation
		}
		d.Events = append(d.Events, e)
		t.events++
	}
	d.ID = events.DeriveID(events.KindCommit, w.id, fmt.Sprint(w.n))
	c, err := d.Seal(subject, w.prev[aspect])
	if err != nil {
		return err
	}
	w.prev[aspect] = c.Hash
	data, err := c.Encode()
	if err != nil {
		return err
	}
	_, err = t.js.PublishAsync(t.log.Partitioning().Subject(subject), data)
	return err
}

// setGroupEnds sets t.ends to the stream sequence of the last commit of each group, which the group's checkpoint must
// reach.
func (t *testbed) setGroupEnds(ctx context.Context, writers []*sessionWriter) error {
	stream, err := t.js.Stream(ctx, "EVENTS-0")
	if err != nil {
		return err
	}
	for _, w := range writers {
		for _, aspect := range []events.Aspect{events.Life, events.Run} {
			m, err := stream.GetLastMsgForSubject(ctx, t.log.Partitioning().Subject(events.Subject{Tenant: w.tenant, ID: w.id, Aspect: aspect}))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			g := t.log.Partitioning().GroupOfID(w.id)
			t.ends[g] = max(t.ends[g], m.Sequence)
		}
	}
	return nil
}
