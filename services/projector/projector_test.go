package projector_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

func TestQuery_IsProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1).create()
	s.turn(1)
	s.turn(2)
	w.awaitProjected(s)
	w.checkAgainstLog(s)
	for sql, want := range map[string]string{
		"SELECT status||' '||architecture||' '||metadata||' '||executions||' '||queued||' '||active_execution FROM sessions":                                   `open spool {"b":1,"a":[true,null]} 2 0 `,
		"SELECT string_agg(phase||' '||ord||' '||input_tokens||' '||cost_usd||' '||result||' '||duration_ms||' '||executor, ',' ORDER BY ord) FROM executions": "completed 0 10 0.25 done 1234 xtr_test,completed 1 10 0.25 done 1234 xtr_test",
		"SELECT string_agg(kind||' '||status, ',' ORDER BY execution_ord, first_seq) FROM blocks WHERE execution_ord = 1":                                      "user_message complete,assistant_text complete,tool_use complete,tool_result complete",
		"SELECT string_agg(tool_name||' '||status||' '||duration_ms, ',') FROM tool_calls":                                                                     "bash complete 3,bash complete 3",
		"SELECT block::json->>'content' FROM blocks WHERE kind = 'user_message' AND execution_ord = 0":                                                         "do <it> & more",
		"SELECT started_at::text FROM executions WHERE ord = 0":                                                                                                queryOne[string](w, "SELECT $1::timestamptz::text", testTime.Add(5*time.Millisecond).Truncate(time.Microsecond)),
	} {
		if got := queryOne[string](w, sql); got != want {
			t.Errorf("%s:\n got %q\nwant %q", sql, got, want)
		}
	}
}

// TestRecovery_IsProjected tests that the row of an execution names the execution that it recovers, also after a rebuild.
func TestRecovery_IsProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1).create()
	failed, recovery := s.post(1), s.execution(2)
	s.append(&s.run, failed, events.ExecutionFailed{Code: "MODEL_ERROR"})
	s.append(&s.life, recovery, events.MessageAccepted{BlockID: s.blockID(recovery), Content: "do it", RecoveredFrom: failed, Continue: true}, events.ExecutionDispatched{})
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT string_agg(phase||' '||recovered_from, ',' ORDER BY ord) FROM executions"); got != "failed ,queued "+failed {
		t.Errorf("executions %q", got)
	}
	w.checkAgainstLog(s)
	w.sameAsRebuilt()
}

// TestEvents_HaveTimeAndConversation tests that the columns by which a timeline counts events hold the values of the events.
func TestEvents_HaveTimeAndConversation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1).create()
	x := s.post(1)
	s.append(&s.run, x, events.BlockComplete{Block: events.Block{ID: "b", Kind: events.KindAssistantText, Content: "x"}}, events.Log{Message: "x"})
	w.awaitProjected(s)
	for sql, want := range map[string]int{
		"SELECT count(*) FROM events WHERE at IS NULL OR abs(extract(epoch FROM at - (event::json->>'time')::timestamptz)) > 0.000001": 0,
		"SELECT count(*) FROM events WHERE conversation <> coalesce(event::json->>'conversationId', '')":                               0,
		"SELECT least(1, count(*)) FROM events WHERE conversation = 'main'":                                                            1,
	} {
		if got := queryOne[int](w, sql); got != want {
			t.Errorf("%s: got %d, want %d", sql, got, want)
		}
	}
	w.sameAsRebuilt()
}

func TestLive_AnnouncesTheStoredEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.session(-1)
	f := s.follow()
	w.start()
	s.create()
	l := f.next()
	if l.Session != s.id || l.Tip != 1 || len(l.Events) != 1 || l.Events[0].Type != "session_created" || l.Events[0].Seq != 1 {
		t.Fatalf("message of LIVE: %+v", l)
	}
	kept := queryOne[string](w, "SELECT event FROM events WHERE session = $1 AND seq = 1", s.id)
	var wire events.WireEvent
	if err := json.Unmarshal([]byte(kept), &wire); err != nil {
		t.Fatal(err)
	}
	if wire.ID != l.Events[0].ID || !wire.Time.Equal(l.Events[0].Time) || string(wire.Data) != string(l.Events[0].Data) {
		t.Errorf("the row has %s, LIVE has %+v", kept, l.Events[0])
	}
}

func TestDeletion_RemovesRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.start()
	s, other := w.session(4).create(), w.session(4).create()
	f := s.follow()
	s.turn(1)
	x := s.post(2)
	s.open(x, "text")
	s.append(&s.life, "", events.SessionDeleted{})
	other.turn(1)
	s.append(&s.run, x, events.ExecutionCancelled{Reason: "session_deleted"})
	w.awaitProjected(s, other)
	left := func(want bool, tables ...string) {
		t.Helper()
		for _, table := range tables {
			if n := queryOne[int](w, "SELECT count(*) FROM "+table+" = $1", s.id); (n != 0) != want {
				t.Errorf("%d rows are left: %s", n, table)
			}
		}
	}
	left(false, "sessions WHERE id", "executions WHERE session", "tool_calls WHERE session")
	left(true, "blocks WHERE session", "events WHERE session") // forks inherit these rows
	s.append(&s.run, "", events.RunRetired{})
	w.awaitProjected(s, other)
	left(false, "blocks WHERE session", "events WHERE session")
	if n := queryOne[int](w, "SELECT count(*) FROM deleted_sessions WHERE tenant = 'default' AND id = $1", s.id); n != 1 {
		t.Errorf("%d tombstones, want one", n)
	}
	w.checkAgainstLog(other)
	for l := f.next(); ; l = f.next() {
		if len(l.Events) > 0 && l.Events[len(l.Events)-1].Type == "session_deleted" {
			break
		}
	}
}

func TestKeys_AreProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	w.start()
	s := w.session(-1)
	cat := events.CatalogueID(events.Key, "acme", "", "", "key_1")
	s.run.Subject = events.Subject{Tenant: "acme", ID: cat, Aspect: events.Key}
	s.append(&s.run, "", events.KeyCreated{KeyID: "key_1", Name: "ci", Prefix: "spool_ab", SHA256: strings.Repeat("a", 64)})
	s.append(&s.run, "", events.KeyRevoked{KeyID: "key_1"})
	s.id = cat
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT tenant||' '||name||' '||prefix||' '||(revoked_at > created_at) FROM keys WHERE sha256 = $1", strings.Repeat("a", 64)); got != "acme ci spool_ab true" {
		t.Errorf("the key is %q", got)
	}
	if got := queryOne[string](w, "SELECT '['||role||agents||created_by||coalesce(expires_at::text, '')||']' FROM keys WHERE id = 'key_1'"); got != "[]" {
		t.Errorf("a key of a build without rights has %s", got)
	}
	cat = events.CatalogueID(events.Key, "acme", "", "", "key_2")
	second := w.session(-1)
	second.run.Subject = events.Subject{Tenant: "acme", ID: cat, Aspect: events.Key}
	expires := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	second.append(&second.run, "", events.KeyCreated{KeyID: "key_2", CreatedBy: "key_1", Rights: events.KeyRights{Role: events.RoleUse, Agents: []string{"a", "b"}, ExpiresAt: expires}})
	second.id = cat
	w.awaitProjected(second)
	if got := queryOne[string](w, "SELECT role||' '||agents||' '||created_by||' '||(expires_at = $1) FROM keys WHERE id = 'key_2'", expires); got != "use a,b key_1 true" {
		t.Errorf("the key has %q", got)
	}
}

func TestUnknownTypesAndInvalidText_AreStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1).create()
	deep := strings.Repeat(`[`, 9000) + strings.Repeat(`]`, 9000)
	s.append(&s.life, "", events.OpaquePayload{Name: "from_the_future", Raw: json.RawMessage(`{"deep":` + deep + `,"nul":"\u0000","esc":"\u001b[31m"}`)})
	x := s.post(1)
	s.append(&s.run, x,
		events.ExecutionFailed{Code: "X", Message: "nul \x00 and \x1b[31m"},
		events.SubagentSpawned{Conversation: strings.Repeat("c", 5000), Parent: "main"})
	s.append(&s.run, "", events.Log{Message: strings.Repeat("x", 400_000)}) // so large that it is stored in the object store
	w.awaitProjected(s)
	w.checkAgainstLog(s)
	if got := queryOne[string](w, "SELECT message FROM executions"); got != "nul \uFFFD and \x1b[31m" {
		t.Errorf("message is %q", got)
	}
	if n := queryOne[int](w, "SELECT length(event) FROM events WHERE type = 'log'"); n < 400_000 {
		t.Errorf("a large event has %d bytes", n)
	}
}

func TestNew_RefusesInvalidSettings(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	for want, cfg := range map[string]projector.Config{
		"database-url: value is empty": {},
		"database-url: ":               {DatabaseURL: "postgres://%zz"},
		"batch-commits: -1":            {DatabaseURL: w.url, BatchCommits: -1},
		"buffer-bytes: 1 ":             {DatabaseURL: w.url, BufferBytes: 1},
		"present-rows: -5":             {DatabaseURL: w.url, PresentRows: -5},
		"lock-retry: 1":                {DatabaseURL: w.url, LockRetry: 1},
	} {
		_, err := projector.New(cfg, projector.Deps{NATS: w.nc, Log: w.log})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", cfg, err, want)
		}
	}
	if _, err := projector.New(projector.Config{DatabaseURL: w.url}, projector.Deps{}); err == nil {
		t.Error("New without NATS returned no error")
	}
}

// TestLive_AnnouncesACommitAtOnce tests that an idle projector announces a commit on LIVE immediately, without
// polling or waiting for a shared commit.
func TestLive_AnnouncesACommitAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1).create()
	f := s.follow()
	w.awaitProjected(s)
	s.turn(1)
	w.awaitProjected(s)
	for {
		if n, _, _ := f.sub.Pending(); n == 0 {
			break
		}
		f.next()
	}
	best := time.Hour
	for n := range 30 {
		time.Sleep(20 * time.Millisecond) // longer than the interval between shared commits, so that the projector is idle
		from := time.Now()
		s.append(&s.life, "", events.SessionOptionsUpdated{Options: events.Options{TurnLimitMs: uint32(n)}})
		f.next()
		best = min(best, time.Since(from))
	}
	t.Logf("append to LIVE: best of 30 is %s", best)
	if best > 12*time.Millisecond {
		t.Errorf("the best of 30 commits took %s to LIVE", best)
	}
}
