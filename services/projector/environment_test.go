package projector_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// appendWork appends a turn that changes files and uses a sandbox and models.
func (s *session) appendWork(n int) string {
	s.w.t.Helper()
	x := s.post(n)
	long := strings.Repeat("deep/", 200) + "file"
	s.append(&s.run, "", events.SandboxCreating{SandboxID: "sbx_1", Provider: "docker", Engine: "e1"},
		events.SandboxReady{SandboxID: "sbx_1", Provider: "docker", Engine: "e1", Image: "agents:2"})
	s.append(&s.run, x,
		events.FileCreated{Path: "a.txt", Size: 3}, events.FileCreated{Path: long, Size: 4, Binary: true}, events.FileCreated{Path: long + "2", Size: 5},
		events.FileModified{Path: "a.txt", Size: 9}, events.FileCreated{Path: "gone", Size: 1}, events.FileDeleted{Path: "gone"},
		events.ModelCalled{Provider: "anthropic", Model: "m", Status: 200, Usage: events.Usage{InputTokens: 10, OutputTokens: 2, CacheReadTokens: 7, CacheWriteTokens: 1}, CostUSD: 0.5, Prices: "2026-01", FirstByteMs: 20, DurationMs: 90},
		events.ModelCalled{Provider: "anthropic", Model: "m", Status: 529, FirstByteMs: 5, DurationMs: 5},
		events.ModelCalled{Provider: "anthropic", Model: "n", Error: "no route to host"},
		events.EgressDenied{Host: "169.254.169.254", Code: "PRIVATE_ADDRESS"},
		events.ExecutionPaused{})
	s.append(&s.run, "", events.SandboxPaused{SandboxID: "sbx_1"}, events.SandboxHealth{SandboxID: "sbx_1", Status: events.Unhealthy, Reason: "no answer", MemoryBytes: 5 << 30, DiskBytes: 77})
	return x
}

const (
	executionsSQL = "SELECT string_agg(phase, ',' ORDER BY ord) FROM executions"
	sandboxesSQL  = "SELECT string_agg(concat_ws(' ', id, provider, engine, image, status, health, health_why, memory_bytes, disk_bytes, reason), ',' ORDER BY id) FROM sandboxes"
	filesSQL      = "SELECT string_agg(concat_ws(' ', length(path), size, \"binary\", deleted, execution), ',' ORDER BY path) FROM files"
	usageSQL      = `SELECT string_agg(concat_ws(' ', provider, model, day, requests, failed, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
		cost_usd, prices, first_byte_ms, duration_ms, execution), ',' ORDER BY model) FROM usage`
	snapshotSQL = "SELECT concat_ws(' ', snapshot, snapshot_at, workspace_files, workspace_bytes) FROM sessions"
)

func TestEnvironment_IsProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop := w.start()
	s := w.session(-1).create()
	x := s.appendWork(1)
	w.awaitProjected(s)
	check := func(wants map[string]string) {
		t.Helper()
		for sql, want := range wants {
			if got := queryOne[string](w, sql); got != want {
				t.Errorf("%s:\n got %q\nwant %q", sql, got, want)
			}
		}
	}
	check(map[string]string{
		executionsSQL: "paused",
		sandboxesSQL:  "sbx_1 docker e1 agents:2 paused unhealthy no answer 5368709120 77 ",
		filesSQL:      fmt.Sprintf("5 9 f f %[1]s,1004 4 t f %[1]s,1005 5 f f %[1]s,4 0 f t %[1]s", x),
		usageSQL:      fmt.Sprintf("anthropic m 2026-05-06 2 1 10 2 7 1 0.5 2026-01 25 95 %[1]s,anthropic n 2026-05-06 1 1 0 0 0 0 0  0 0 %[1]s", x),
		snapshotSQL:   " 0 0",
	})
	stop() // the next projector starts from rows that it reads from Postgres
	w.start()
	s.append(&s.run, x, events.ExecutionResumed{PausedMs: 5}, events.FileModified{Path: "a.txt", Size: 10},
		events.ModelCalled{Provider: "anthropic", Model: "m", Status: 200, CostUSD: 0.25, Prices: "2026-02", DurationMs: 5})
	s.append(&s.run, "", events.SandboxResumed{SandboxID: "sbx_1"}, events.SandboxHealth{SandboxID: "sbx_1", Status: events.Healthy},
		events.WorkspaceSynced{Snapshot: "default/s/snap-1", Files: 3, Bytes: 1 << 40, Reason: "turn"})
	w.awaitProjected(s)
	synced := queryOne[string](w, "SELECT $1::timestamptz::text", testTime.Add(time.Duration(s.n)*time.Millisecond).Truncate(time.Microsecond))
	check(map[string]string{
		executionsSQL: "running",
		sandboxesSQL:  "sbx_1 docker e1 agents:2 ready healthy  0 0 ",
		usageSQL:      fmt.Sprintf("anthropic m 2026-05-06 3 1 10 2 7 1 0.75 2026-02 25 100 %[1]s,anthropic n 2026-05-06 1 1 0 0 0 0 0  0 0 %[1]s", x),
		snapshotSQL:   "default/s/snap-1 " + synced + " 3 1099511627776",
	})
	w.checkAgainstLog(s)
	w.sameAsRebuilt()
	before := w.dump()
	w.rebuild()
	if w.dump() != before {
		t.Error("a rebuild without new commits changes the rows")
	}
	for table, plant := range map[string]string{"files": "UPDATE files SET size = size + 1", "usage": "UPDATE usage SET cost_usd = 9", "sandboxes": "UPDATE sandboxes SET health = 'x'", "sessions": "UPDATE sessions SET snapshot = 'x'"} {
		w.exec(plant)
		_, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true)
		var d *projector.DifferenceError
		if !errors.As(err, &d) || d.Table != table {
			t.Errorf("after %s: got %v", plant, err)
		}
		w.rebuild()
	}
	s.append(&s.life, "", events.SessionDeleted{})
	w.awaitProjected(s)
	for _, table := range []string{"files", "usage", "sandboxes"} {
		if n := queryOne[int](w, "SELECT count(*) FROM "+table); n != 0 {
			t.Errorf("%d rows of %s outlive their session", n, table)
		}
	}
}

// TestSandboxUsage_IsProjected tests that the cost of sandboxes is added to the session, to the execution during
// which they ran, and to the tenant, also if a sandbox ends after its session was deleted.
func TestSandboxUsage_IsProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop := w.start()
	s := w.session(-1).create()
	x := s.post(1)
	used := func(ms uint64, usd float64) events.SandboxUsage {
		return events.SandboxUsage{SandboxID: "sbx_1", Provider: "modal", DurationMs: ms, CostUSD: usd}
	}
	s.append(&s.run, x, used(1000, 0.5))
	w.awaitProjected(s)
	stop() // the next projector starts from rows that it reads from Postgres
	w.start()
	s.append(&s.run, "", used(200, 0.125))
	s.append(&s.run, x, used(30, 0.25), events.ExecutionCompleted{DurationMs: 7})
	w.awaitProjected(s)
	const session, execution = "SELECT concat_ws(' ', sandbox_ms, sandbox_cost_usd) FROM sessions", "SELECT concat_ws(' ', sandbox_ms, sandbox_cost_usd) FROM executions"
	const tenant = "SELECT sum(cost_usd) FROM tenant_usage"
	if got, of := queryOne[string](w, session), queryOne[string](w, execution); got != "1230 0.875" || of != "1030 0.75" || queryOne[float64](w, tenant) != 0.875 {
		t.Errorf("session %s, execution %s, tenant %g", got, of, queryOne[float64](w, tenant))
	}
	w.checkAgainstLog(s)
	w.sameAsRebuilt()
	s.append(&s.life, "", events.SessionDeleted{})
	s.append(&s.run, "", used(4, 1), events.SandboxTerminated{SandboxID: "sbx_1", Reason: "session_deleted"})
	w.awaitProjected(s)
	if got := queryOne[float64](w, tenant); got != 1.875 {
		t.Errorf("after the deletion the tenant has spent $%g", got)
	}
	w.sameAsRebuilt()
	s.append(&s.run, "", events.RunRetired{Usage: []events.DayUsage{{Day: "2026-05-06", Spent: events.BudgetUsage{CostUSD: 1.875, TimeMs: 7}}}})
	w.awaitProjected(s)
	if got := queryOne[float64](w, tenant); got != 1.875 {
		t.Errorf("after its end the tenant has spent $%g", got)
	}
}

// TestManyFiles_AreWrittenWithCopy tests that a commit with very many files is written with COPY, first as new rows and then as changes.
func TestManyFiles_AreWrittenWithCopy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.session(-1).create()
	x := s.post(1)
	const files = 3000
	for _, size := range []uint64{1, 2} {
		var list []events.Payload
		for n := range files {
			list = append(list, events.FileCreated{Path: fmt.Sprint("f/", n), Size: size})
		}
		s.append(&s.run, x, list...)
	}
	w.start()
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT count(*)||' '||sum(size) FROM files"); got != fmt.Sprint(files, " ", 2*files) {
		t.Errorf("got %s", got)
	}
	w.sameAsRebuilt()
}
