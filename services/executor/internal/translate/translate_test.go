package translate

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

var (
	begun = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	now   = begun.Add(time.Minute)
)

const (
	journal   = "jnl_01JGK0000000000000000000AA"
	execution = "exe_01JGK0000000000000000000AA"
)

func fresh() *Translator {
	return &Translator{Journal: journal, ExecutionID: execution, Epoch: 4, Attempt: 2, Time: begun}
}

func line(n uint64, typ events.Type, data string) runner.JournalLine {
	return runner.JournalLine{N: n, Type: typ, Time: begun.Add(time.Second), ExecutionID: execution, ConversationID: "main", Data: json.RawMessage(data)}
}

// one translates a line that must return exactly one result.
func one(t *testing.T, tr *Translator, l runner.JournalLine) LineResult {
	t.Helper()
	out := tr.TranslateLine(l, now)
	if len(out) != 1 {
		t.Fatalf("line %d gives %d results", l.N, len(out))
	}
	return out[0]
}

func TestEvents(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		line runner.JournalLine
		want string // the stored data
	}{
		"agent started": {line(1, runner.AgentStarted, `{"attempt":99,"warm":true,"pid":7,"policy":"workspace"}`), `{"attempt":2,"warm":true,"pid":7,"policy":"workspace"}`},
		"log":           {line(1, "log", `{"level":"info","stream":"stderr","message":"hi"}`), `{"level":"info","stream":"stderr","message":"hi"}`},
		"sub-agent keeps the agent's ids": {
			line(1, "subagent_spawned", `{"subagentId":"s1","subConversationId":"c1","toolUseId":"toolu_1","parentConversationId":"main"}`),
			`{"subagentId":"s1","subConversationId":"c1","toolUseId":"toolu_1","parentConversationId":"main"}`,
		},
		"block ids are the host's": {
			line(1, "block_update", `{"blockId":"b1","updates":{"summary":"s"}}`),
			`{"blockId":"` + events.DeriveID(events.KindBlock, journal, "b1") + `","updates":{"summary":"s"}}`,
		},
		"a block's execution, conversation and time are the host's": {
			line(1, "block_start", `{"block":{"id":"b1","kind":"tool_use","status":"odd","timestamp":"2999-01-01T00:00:00Z","executionId":"exe_other","conversationId":"other","toolUseId":"toolu_1"}}`),
			`{"block":{"id":"` + events.DeriveID(events.KindBlock, journal, "b1") + `","kind":"tool_use","status":"pending","timestamp":"2026-01-02T03:04:06Z","executionId":"` + execution + `","conversationId":"main","toolUseId":"toolu_1"}}`,
		},
		"forged end":      {line(1, "execution_completed", `{}`), `{"code":"FORGED_EVENT","message":"line 1 of the runner claims to be execution_completed, which a runner must not write"}`},
		"forged claim":    {line(1, "execution_claimed", `{"epoch":99}`), `{"code":"FORGED_EVENT","message":"line 1 of the runner claims to be execution_claimed, which a runner must not write"}`},
		"forged life":     {line(1, "message_accepted", `{}`), `{"code":"FORGED_EVENT","message":"line 1 of the runner claims to be message_accepted, which a runner must not write"}`},
		"forged message":  {line(1, "block_start", `{"block":{"id":"b","kind":"user_message"}}`), `{"code":"FORGED_EVENT","message":"line 1 of the runner claims to be a message of the user"}`},
		"unknown type":    {line(1, "novel", `{"a":1}`), `{"level":"warn","stream":"runner","message":"line of unknown type \"novel\": {\"a\":1}"}`},
		"data of no kind": {line(1, "block_start", `[]`), `{"code":"BAD_LINE","message":"line 1 of the runner: the data of \"block_start\" cannot be read: []"}`},
		"a nameless block": {line(1, "block_complete", `{"block":{"kind":"assistant_text"}}`),
			`{"code":"BAD_LINE","message":"line 1 of the runner: the data of \"block_complete\" cannot be read: {\"block\":{\"kind\":\"assistant_text\"}}"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := one(t, fresh(), c.line).Event
			if e == nil {
				t.Fatal("no event")
			}
			var stored struct{ Data json.RawMessage }
			raw, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(raw, &stored); err != nil {
				t.Fatal(err)
			}
			if string(stored.Data) != c.want {
				t.Errorf("data %s\nwant %s", stored.Data, c.want)
			}
			if e.ID != events.DeriveID(events.KindEvent, journal, "1") || e.N != 1 || e.ExecutionID != execution || e.Source != events.FromRunner {
				t.Errorf("event %+v", e)
			}
		})
	}
}

func TestDelta(t *testing.T) {
	t.Parallel()
	d := one(t, fresh(), line(1, events.TextDelta, `{"blockId":"b1","offset":5,"delta":"x"}`)).Delta
	want := events.Delta{
		BlockID: events.DeriveID(events.KindBlock, journal, "b1"), ExecutionID: execution, ConversationID: "main", Epoch: 4, Offset: 5, Text: "x", Time: begun.Add(time.Second),
	}
	if d == nil || *d != want {
		t.Errorf("delta %+v, want %+v", d, want)
	}
}

func TestEnd(t *testing.T) {
	t.Parallel()
	e := one(t, fresh(), line(1, runner.TurnEnded, `{"outcome":"completed","result":"r"}`)).Ended
	if e == nil || e.Outcome != runner.OutcomeCompleted || e.Result != "r" || e.N != 1 {
		t.Errorf("end %+v", e)
	}
	// An end that cannot be read is an end all the same.
	e = one(t, fresh(), line(1, runner.TurnEnded, `[]`)).Ended
	if e == nil || e.Outcome != runner.OutcomeFailed || e.Code != CodeBadLine {
		t.Errorf("end %+v", e)
	}
}

func TestOtherExecutions_AreReportedOnce(t *testing.T) {
	t.Parallel()
	tr := fresh()
	l := line(1, runner.TurnEnded, `{"outcome":"completed"}`)
	l.ExecutionID = "exe_other"
	r := one(t, tr, l)
	if log, ok := r.Event.Data.(events.Log); !ok || r.Ended != nil || !strings.Contains(log.Message, "exe_other") || r.Event.ExecutionID != "" && r.Event.ExecutionID != execution {
		t.Errorf("another execution's end is %+v", r)
	}
	l.N = 2
	if out := tr.TranslateLine(l, now); len(out) != 0 {
		t.Errorf("told twice: %+v", out)
	}
	between := line(3, "log", `{"message":"m"}`)
	between.ExecutionID = ""
	if e := one(t, tr, between).Event; e.ExecutionID != "" {
		t.Errorf("what is said between turns is of %s", e.ExecutionID)
	}
}

func TestNumbers_GapEndsTheJournal(t *testing.T) {
	t.Parallel()
	tr := fresh()
	tr.Last = 5
	if out := tr.TranslateLine(line(5, "log", `{}`), now); len(out) != 0 {
		t.Errorf("a line that was seen gives %+v", out)
	}
	out := tr.TranslateLine(line(8, "log", `{}`), now)
	if len(out) != 2 || out[0].Event.Data.(events.Error).Code != CodeJournalGap || out[0].Event.N != 6 || out[1].Gap == "" || out[1].Event != nil {
		t.Errorf("a gap gives %+v", out)
	}
}

func TestTimes_StayWithinTheirLimits(t *testing.T) {
	t.Parallel()
	tr := fresh()
	for i, c := range []struct{ said, want time.Time }{
		{begun.Add(-time.Hour), begun},                        // not before the claim
		{begun.Add(time.Second), begun.Add(time.Second)},      // believed
		{begun.Add(time.Millisecond), begun.Add(time.Second)}, // not before the event before
		{now.Add(time.Hour), now},                             // not in the future
		{time.Time{}, now},
	} {
		l := line(uint64(i+1), "log", `{}`) //nolint:gosec // small
		l.Time = c.said
		if e := one(t, tr, l).Event; !e.Time.Equal(c.want) {
			t.Errorf("said %s, is %s, want %s", c.said, e.Time, c.want)
		}
	}
}

func TestConversations(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{"": "main", "sub-1": "sub-1", "a\nb": "main", "a\x00": "main", strings.Repeat("x", 129): "main"} {
		l := line(1, "log", `{}`)
		l.ConversationID = said
		if e := one(t, fresh(), l).Event; e.ConversationID != want {
			t.Errorf("%q is %q, want %q", said, e.ConversationID, want)
		}
	}
}

func TestGarbage_IsShown(t *testing.T) {
	t.Parallel()
	tr := fresh()
	a := tr.TranslateGarbage("x", "one", false, now).Event
	b := tr.TranslateGarbage("x", strings.Repeat("é", 2000), true, now).Event
	if a.ID == b.ID || a.N != 0 || !strings.Contains(a.Data.(events.Log).Message, "one") {
		t.Errorf("%+v\n%+v", a, b)
	}
	if m := b.Data.(events.Log).Message; len(m) > 1200 || !strings.Contains(m, "more than") {
		t.Errorf("%d bytes: %.100s", len(m), m)
	}
}

// For any lines of a runner: Translator does not panic, numbers and times ascend, the execution and the source are the
// host's, and no type of the host gets through.
func TestTranslator_HoldsItsInvariantsForAnyLines(t *testing.T) {
	t.Parallel()
	names := []events.Type{runner.AgentStarted, runner.TurnEnded, events.TextDelta, "", "novel"}
	for _, e := range events.EventTypes() {
		names = append(names, e.Type)
	}
	allowed := map[events.Type]bool{
		"execution_started": true, "block_start": true, "block_update": true, "block_complete": true, "subagent_spawned": true, "subagent_completed": true,
		"permission_decided": true, "transcript_written": true, "metadata_update": true, "log": true, "error": true, "watchdog_warned": true,
		"file_created": true, "file_modified": true, "file_deleted": true,
	}
	between := map[events.Type]bool{"log": true, "error": true, "file_created": true, "file_modified": true, "file_deleted": true}
	rapid.Check(t, func(t *rapid.T) {
		tr := fresh()
		last, n := begun, uint64(0)
		for range rapid.IntRange(1, 20).Draw(t, "lines") {
			l := runner.JournalLine{
				N: rapid.Uint64Range(0, 30).Draw(t, "n"), Type: rapid.SampledFrom(names).Draw(t, "type"),
				Time:           begun.Add(time.Duration(rapid.IntRange(-1000, 1000).Draw(t, "time")) * time.Second),
				ExecutionID:    rapid.SampledFrom([]string{"", execution, "exe_other"}).Draw(t, "execution"),
				ConversationID: rapid.String().Draw(t, "conversation"),
				Data:           json.RawMessage(rapid.SampledFrom([]string{"", "null", "{}", "[]", `{"block":{"id":"b","kind":"error"}}`, `{"blockId":"b"}`, `{"path":"p"}`, "{", `"x"`}).Draw(t, "data")),
			}
			for _, r := range tr.TranslateLine(l, now) {
				e := r.Event
				if e == nil {
					continue
				}
				if e.N <= n || e.Time.Before(last) || e.Time.After(now) || e.Source != events.FromRunner || !allowed[e.Type()] {
					t.Fatalf("after number %d and %s: %+v", n, last, e)
				}
				if e.ExecutionID != execution && (e.ExecutionID != "" || !between[e.Type()]) {
					t.Fatalf("of another execution: %+v", e)
				}
				last, n = e.Time, e.N
			}
		}
	})
}
