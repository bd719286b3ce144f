package jslog_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// modelWriter appends commits to one subject, like an executor: it repeats an append whose outcome is unknown, and
// loads the head after a conflict.
type modelWriter struct {
	log     *jslog.Log
	model   *streamModel
	subject events.Subject
	name    string
	commits int

	acknowledged []eventlog.Head
	refused      []string // ids of commits that met a conflict or a full disk
}

func (w *modelWriter) run(ctx context.Context) error {
	head := eventlog.Head{Subject: w.subject}
	for i := range w.commits {
		draft := eventlogtest.Draft(fmt.Sprint(w.name, i), w.name)
		ended := w.model.context(ctx)
		next, err := w.log.Append(ended, head, draft)
		if errors.Is(err, eventlog.ErrUnavailable) && ended.Err() != nil {
			next, err = w.log.Append(ctx, head, draft)
		}
		// After an unknown outcome the commit may be stored, also if a later append is refused.
		unknown := ended.Err() != nil
		for errors.Is(err, eventlog.ErrFull) && (unknown || errors.Is(err, eventlog.ErrUnavailable)) {
			unknown = true
			next, err = w.log.Append(ctx, head, draft)
		}
		var conflict *eventlog.ConflictError
		switch {
		case errors.Is(err, eventlog.ErrFull):
			w.refused = append(w.refused, draft.ID)
		case err == nil:
			w.acknowledged, head = append(w.acknowledged, next), next
		case errors.As(err, &conflict):
			w.refused = append(w.refused, draft.ID)
			if head, err = w.log.Last(ctx, w.subject, eventlog.LeaderOnly); err != nil {
				return err
			}
		default:
			return err
		}
	}
	return nil
}

// TestBatches_HoldInEveryInterleaving runs concurrent writers against a model of a stream with faults. Every
// acknowledged commit is stored once, at the acknowledged position. No commit that met a conflict or a full disk is stored. All
// chains and signatures hold. In the end nothing is in flight.
func TestBatches_HoldInEveryInterleaving(t *testing.T) {
	t.Parallel()
	batches := 0
	rapid.Check(t, func(rt *rapid.T) {
		plan := rapid.SliceOfN(rapid.SampledFrom(faults), 0, 30).Draw(rt, "faults")
		subjects := rapid.IntRange(1, 20).Draw(rt, "subjects")
		rivals := rapid.IntRange(0, 3).Draw(rt, "rivals")
		commits := rapid.IntRange(1, 4).Draw(rt, "commits")
		least := rapid.SampledFrom([]int{1, 2, 5}).Draw(rt, "smallest batch")
		m, stop := newStreamModel(t, plan)
		defer stop()
		js, err := jetstream.New(m.client)
		if err != nil {
			rt.Fatal(err)
		}
		log, err := jslog.New(jslog.Config{
			JetStream: js, AckTimeout: 50 * time.Millisecond, Keys: modelKeys,
			Signing: topology.SigningSettings{After: []uint64{0}, Keys: modelKeys.KeyIDs(), CommitVersion: events.CommitVersion},
		})
		if err != nil {
			rt.Fatal(err)
		}
		jslog.SetMinBatch(log, least)
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		var writers []*modelWriter
		var g errgroup.Group
		for i := range subjects + rivals {
			s := events.RunSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, fmt.Sprint("model", i%subjects)))
			w := &modelWriter{log: log, model: m, subject: s, name: fmt.Sprint("writer ", i, " "), commits: commits}
			writers = append(writers, w)
			g.Go(func() error { return w.run(ctx) })
		}
		if err := g.Wait(); err != nil {
			rt.Fatalf("append: %v", err)
		}
		for !jslog.IsIdle(log) && ctx.Err() == nil { // a batch may still wait for a lost acknowledgement
			time.Sleep(time.Millisecond)
		}
		if !jslog.IsIdle(log) {
			rt.Fatal("all writers have returned, but a publish still counts as in flight")
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, p := range m.problems {
			rt.Error(p)
		}
		batches += m.biggest
		checkModel(rt, m, writers)
	})
	if batches == 0 {
		t.Error("no batch was stored")
	}
}

// checkModel compares what the model stores with what the writers know.
func checkModel(rt *rapid.T, m *streamModel, writers []*modelWriter) {
	stored := map[string]uint64{}
	prev := map[string]string{}
	for i, msg := range m.stored {
		s, err := events.ParseSubject(msg.subject)
		if err != nil {
			rt.Fatal(err)
		}
		c, err := events.DecodeCommit(msg.data)
		if err != nil {
			rt.Fatal(err)
		}
		if at := stored[c.ID]; at > 0 {
			rt.Errorf("commit %s is stored at %d and at %d", c.ID, at, i+1)
		}
		stored[c.ID] = uint64(i + 1)
		if c.Prev != prev[msg.subject] || c.ComputeHash(s) != c.Hash {
			rt.Errorf("commit %d of %s is not chained", i+1, s)
		}
		prev[msg.subject] = c.Hash
		if why, err := modelKeys.CheckSignature(s, c, msg.header.Get(topology.HeaderSignature)); why != "" || err != nil {
			rt.Errorf("signature of commit %d: %s, %v", i+1, why, err)
		}
	}
	for _, w := range writers {
		for _, h := range w.acknowledged {
			if stored[h.Commit.ID] != h.Seq {
				rt.Errorf("%sacknowledged commit %s at %d, which is stored at %d", w.name, h.Commit.ID, h.Seq, stored[h.Commit.ID])
			}
		}
		for _, id := range w.refused {
			if stored[id] > 0 {
				rt.Errorf("%scommit %s was refused and is stored at %d", w.name, id, stored[id])
			}
		}
	}
}

// TestBatches_FormOnlyFromWaitingCommits tests that fewer writers than the smallest batch never share one, that more do,
// and that after a batch a single writer does not wait for others.
func TestBatches_FormOnlyFromWaitingCommits(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	m, stop := newStreamModel(t, nil)
	defer stop()
	js, err := jetstream.New(m.client)
	if err != nil {
		t.Fatal(err)
	}
	log := openConfig(t, jslog.Config{JetStream: js, AckTimeout: 2 * wait}) // a commit that waited for nothing would wait for the context
	round := 0
	appendAll := func(writers int) (biggest int) {
		t.Helper()
		var g errgroup.Group
		m.mu.Lock() // the model answers nothing until all that cannot be published at once wait
		for i := range writers {
			name := fmt.Sprint("round ", round, " writer ", i)
			head := eventlog.Head{Subject: events.RunSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, name))}
			g.Go(func() error {
				for j := range 3 {
					var err error
					if head, err = log.Append(ctx, head, eventlogtest.Draft(fmt.Sprint(name, " commit ", j), "x")); err != nil {
						return err
					}
				}
				return nil
			})
		}
		for jslog.Waiting(log) < writers-32 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		m.mu.Unlock()
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		round++
		m.mu.Lock()
		defer m.mu.Unlock()
		biggest, m.biggest = m.biggest, 0
		return biggest
	}
	for _, try := range []struct {
		writers int
		batches bool
	}{{1, false}, {32, false}, {500, true}, {1, false}} {
		if biggest := appendAll(try.writers); (biggest >= 32) != try.batches || biggest > 0 && !try.batches {
			t.Errorf("the largest batch of %d writers has %d commits", try.writers, biggest)
		}
	}
}
