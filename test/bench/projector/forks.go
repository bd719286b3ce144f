package projector

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/fork"
	runs "github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

const (
	// maxForkShare is the performance target: the maximum time of a request for a fork, as a share of the time to read the
	// whole log of the session.
	maxForkShare = 0.1
	// forkRequests is the number of measured requests for a fork at each of several events.
	forkRequests = 10
)

// storeSnapshot stores a snapshot in the object store. The benchmark's log names it at the end of every turn.
func (t *testbed) storeSnapshot(ctx context.Context, tenant, session string) error {
	store, err := natsstore.Open(ctx, t.js, topology.BucketWorkspaces)
	if err != nil {
		return err
	}
	box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a.txt": "a\n"}}
	r, err := workspace.Snapshot(ctx, box, store, workspace.Options{Tenant: tenant, Session: session})
	t.snapshot = r.ID
	return err
}

// appendStates appends a commit to both subjects of a session, with the state in it. The commits that fillLog publishes
// have no state.
func (t *testbed) appendStates(ctx context.Context, id string) error {
	sessions := eventlog.Sessions{Log: t.log}
	l, err := sessions.Load(ctx, "default", id, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	actor := events.Actor{Kind: "executor", ID: "xtr_bench"}
	event := func(n string, data events.Payload) events.Event {
		return events.Event{ID: events.DeriveID(events.KindEvent, id, n), Time: firstEventTime, Source: events.FromServer, Data: data}
	}
	if err := sessions.AppendRunPart(ctx, l, actor, events.DeriveID(events.KindCommit, id, "run"), runs.Decision{Epoch: 1, Events: []events.Event{event("run", events.WorkspaceSynced{Snapshot: t.snapshot})}}); err != nil {
		return err
	}
	t.events += 2
	return sessions.AppendLife(ctx, l, actor, events.DeriveID(events.KindCommand, id, "life"), []events.Event{event("life", events.SessionOptionsUpdated{Options: l.Life.Options})})
}

// reportForks measures requests for forks of a session at several of its events, and requests for the history of a
// fork. It reports the rows of docs/performance.md. url is the URL of a gateway.
func (t *testbed) reportForks(ctx context.Context, b *harness.Bench, url string) (err error) {
	s, err := session.New(session.Config{}, session.Deps{NATS: t.nc, Log: t.log, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	p, err := projector.New(projector.Config{DatabaseURL: t.url}, projector.Deps{NATS: t.nc, Log: t.log})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 2)
	go func() { done <- s.Run(running) }()
	go func() { done <- p.Run(running) }()
	defer func() {
		stop()
		err = errors.Join(err, <-done, <-done)
	}()
	select {
	case <-s.Ready():
	case err := <-done:
		done <- nil
		return err
	}
	id := events.DeriveID(events.KindSession, "bench", "0")
	whole, err := t.timeForkFromLog(ctx, id)
	if err != nil {
		return err
	}
	path := url + "/api/sessions/" + id + "/fork"
	var last string
	for _, seq := range []int{t.events / 100, t.events / 2, t.events} {
		a, err := timeCalls(seq, forkRequests, func() error {
			var answer struct{ SessionID, Position string }
			err := sendRequest(ctx, http.MethodPost, path, fmt.Sprintf(`{"at":%d}`, seq), &answer)
			last = answer.SessionID + "?minPosition=" + answer.Position
			return err
		})
		if err != nil {
			return err
		}
		ratio := quantileMs(a.took, 0.5) / quantileMs(whole.took, 0.5)
		if err := b.ReportRow(row.Row{
			What: fmt.Sprintf("fork at event %d of a session with %d events, over REST", seq, t.events), Target: fmt.Sprintf("under %.0f %% of reading its log", 100*maxForkShare),
			Measured: fmt.Sprintf("%.1f ms and %.1f MB allocated, of %d", quantileMs(a.took, 0.5), float64(a.allocated)/1e6, len(a.took)),
			Against:  fmt.Sprintf("the log read from its start: %.1f ms and %.1f MB allocated", quantileMs(whole.took, 0.5), float64(whole.allocated)/1e6),
			Ratio:    ratio, P50Ms: quantileMs(a.took, 0.5), P99Ms: quantileMs(a.took, 0.99), OK: ratio < maxForkShare, Command: harness.ShellCommand(statesOnlyArguments),
			Note: "without the first fork of the session; gateway, session service, NATS, client and Postgres share the machine",
		}); err != nil {
			return err
		}
	}
	return t.reportForkHistory(ctx, b, url+"/api/sessions/", last)
}

// timeForkFromLog measures how long it takes to read a session's whole log and to decide where a fork of it begins.
func (t *testbed) timeForkFromLog(ctx context.Context, id string) (callTimings, error) {
	return timeCalls(t.events, 3, func() error {
		w := fork.NewFinder(fork.LastEvent)
		for e, err := range eventlog.SessionEvents(ctx, t.log, "default", id) {
			if err != nil {
				return err
			}
			w.Add(e.Seq, e.Event)
		}
		_, err := w.ForkPoint()
		return err
	})
}

// reportForkHistory measures requests for the events and for the blocks of a fork, all of which belong to the session
// that it was forked from. It reports the rows of docs/performance.md. fork is the id of the fork and its position, as
// part of a URL.
func (t *testbed) reportForkHistory(ctx context.Context, b *harness.Bench, url, fork string) error {
	var id, position string
	if _, err := fmt.Sscanf(fork, "%30s?minPosition=%s", &id, &position); err != nil {
		return fmt.Errorf("fork %q: %w", fork, err)
	}
	if err := sendRequest(ctx, http.MethodGet, url+fork, "", new(any)); err != nil {
		return err
	}
	for _, q := range []string{"history?limit=1000", fmt.Sprintf("history?limit=1000&after=%d", t.events-1100), "history/blocks"} {
		a, err := timeCalls(t.events, forkRequests, func() error { return sendRequest(ctx, http.MethodGet, url+id+"/"+q, "", new(any)) })
		if err != nil {
			return err
		}
		if err := b.ReportRow(row.Row{
			What: fmt.Sprintf("%s of a fork of a session with %d events, over REST", q, t.events), Measured: fmt.Sprintf("%.1f ms and %.1f MB allocated, of %d", quantileMs(a.took, 0.5), float64(a.allocated)/1e6, len(a.took)),
			P50Ms: quantileMs(a.took, 0.5), P99Ms: quantileMs(a.took, 0.99), Command: harness.ShellCommand(statesOnlyArguments),
		}); err != nil {
			return err
		}
	}
	return nil
}

// timeCalls calls do n times, after one call that is not measured, and returns the durations and the allocated memory.
// seq is the seq of the event that the calls refer to.
func timeCalls(seq, n int, do func() error) (callTimings, error) {
	a := callTimings{seq: seq}
	var before, after runtime.MemStats
	for i := range n + 1 {
		if i == 1 {
			runtime.ReadMemStats(&before)
		}
		start := time.Now()
		if err := do(); err != nil {
			return a, err
		}
		if i > 0 {
			a.took = append(a.took, time.Since(start))
		}
	}
	runtime.ReadMemStats(&after)
	a.allocated = (after.TotalAlloc - before.TotalAlloc) / uint64(n)
	return a, nil
}

// sendRequest sends an HTTP request and decodes the JSON of the response into to. A status other than 2xx is an error.
func sendRequest(ctx context.Context, method, url, body string, to any) error {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s: status %s: %.300s", url, resp.Status, text)
	}
	return json.Unmarshal(text, to)
}
