package loops_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/loops"
)

// A journal makes the events of an execution.
type journal struct {
	n    uint64
	list []events.Event
}

func (j *journal) add(conversation string, p events.Payload) {
	j.n++
	j.list = append(j.list, events.Event{N: j.n, ConversationID: conversation, Data: p})
}

// start opens a call and completes its arguments.
func (j *journal) start(conversation, id, tool, input string) {
	b := events.Block{ID: "b" + id, Kind: events.KindToolUse, Status: events.StatusPending, ToolName: tool, ToolUseID: id}
	j.add(conversation, events.BlockStart{Block: b})
	b.Status, b.Input = events.StatusComplete, json.RawMessage(input)
	j.add(conversation, events.BlockComplete{Block: b})
}

// end adds the result of a call.
func (j *journal) end(conversation, id, output string, failed bool) {
	j.add(conversation, events.BlockStart{Block: events.Block{
		ID: "r" + id, Kind: events.KindToolResult, Status: events.StatusComplete, ToolUseID: id, Output: output, IsError: failed,
	}})
}

// call adds a call with its result. A call is written as "tool arguments = result"; the parts after the tool may be absent.
func (j *journal) call(conversation, what string) {
	call, result, _ := strings.Cut(what, " = ")
	tool, input, _ := strings.Cut(call, " ")
	id := fmt.Sprint("call", j.n)
	j.start(conversation, id, tool, input)
	j.end(conversation, id, result, strings.HasPrefix(result, "!"))
}

// outcome passes events to a Detector, and returns its warnings and the codes with which it stops the execution, in order.
func outcome(d *loops.Detector, list []events.Event) string {
	var out []string
	for _, e := range list {
		f := d.HandleEvent(e)
		if w := f.Warning; w != nil {
			out = append(out, fmt.Sprintf("%s: %s %d of %d/%d", f.Conversation, w.ToolName, w.Calls, w.Limit, w.StopAt))
		}
		if f.Code != "" && !slices.Contains(out, f.Code) {
			out = append(out, f.Code)
		}
	}
	return strings.Join(out, ", ")
}

func agent(l events.Loops) events.AgentSpec { return events.AgentSpec{Loops: l} }

// TestDetector_CountsEqualCallsInARow: calls with equal arguments and equal results count, from the last different call on.
func TestDetector_CountsEqualCallsInARow(t *testing.T) {
	t.Parallel()
	times := func(n int, calls ...string) []string { return slices.Repeat(calls, n) }
	const warned, stopped = "main: read 3 of 3/5", "main: read 3 of 3/5, LOOP_DETECTED"
	for name, c := range map[string]struct {
		loops events.Loops
		calls []string
		want  string
	}{
		"two equal calls":                    {calls: times(2, `read {"a":1} = x`)},
		"three equal calls":                  {calls: times(3, `read {"a":1} = x`), want: warned},
		"four equal calls":                   {calls: times(4, `read {"a":1} = x`), want: warned},
		"five equal calls":                   {calls: times(5, `read {"a":1} = x`), want: stopped},
		"failed calls":                       {calls: times(5, `read {"a":1} = !no`), want: stopped},
		"calls without arguments":            {calls: times(5, `read`), want: stopped},
		"arguments that are not JSON":        {calls: times(5, `read {"a = x`), want: stopped},
		"other arguments":                    {calls: []string{`read {"a":1} = x`, `read {"a":2} = x`, `read {"a":3} = x`, `read {"a":4} = x`, `read {"a":5} = x`}},
		"arguments with digits of their own": {calls: []string{`read {"a":9007199254740993} = x`, `read {"a":9007199254740992} = x`, `read {"a":9007199254740993} = x`}},
		"other tools":                        {calls: []string{`a {} = x`, `b {} = x`, `c {} = x`, `d {} = x`, `e {} = x`}},
		"pairs":                              {calls: times(10, `read {"a":1} = x`, `write {"a":1} = x`)},
		"two of each":                        {calls: times(5, `read {} = x`, `read {} = x`, `write {} = x`, `write {} = x`)},
		"results that change":                {calls: []string{`read = 1`, `read = 2`, `read = 3`, `read = 4`, `read = 5`, `read = 6`}},
		"results that alternate":             {calls: times(5, `read = 1`, `read = 2`)},
		"a result that changes once":         {calls: []string{`read = 1`, `read = 1`, `read = 2`, `read = 2`}},
		"an output that becomes an error":    {calls: []string{`read = 1`, `read = 1`, `read = !1`, `read = !1`}},
		"a series after another":             {calls: append(times(3, `read = 1`), times(3, `read = 2`)...), want: warned + ", " + warned},
		"a series after another call":        {calls: append(append(times(4, `read = 1`), `write = 1`), times(4, `read = 1`)...), want: warned + ", " + warned},
		"equal JSON in other forms": {
			calls: []string{`read {"a":1,"b":[1,2]} = x`, `read {"b":[1,2], "a":1} = x`, `read { "b" : [ 1, 2 ], "\u0061":1 } = x`}, want: warned,
		},
		"limits of the agent":       {loops: events.Loops{Warn: 2, Stop: 4}, calls: times(4, `read = x`), want: "main: read 2 of 2/4, LOOP_DETECTED"},
		"a stop before the warning": {loops: events.Loops{Stop: 2}, calls: times(2, `read = x`), want: "main: read 2 of 2/2, LOOP_DETECTED"},
		"a long series":             {loops: events.Loops{Warn: 12, Stop: 15}, calls: times(15, `read = x`), want: "main: read 12 of 12/15, LOOP_DETECTED"},
		"only warnings":             {loops: events.Loops{Action: "warn"}, calls: times(30, `read = x`), want: "main: read 3 of 3/0"},
		"off":                       {loops: events.Loops{Action: "none"}, calls: times(30, `read = x`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j journal
			for _, call := range c.calls {
				j.call(events.MainConversation, call)
			}
			if got := outcome(loops.New(agent(c.loops)), j.list); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// TestDetector_CountsACallWhenItHasReturned: calls that run at the same time count in the order in which they were made, as far as they
// have returned.
func TestDetector_CountsACallWhenItHasReturned(t *testing.T) {
	t.Parallel()
	const conversation = events.MainConversation
	var j journal
	for i := range 5 {
		j.start(conversation, fmt.Sprint(i), "read", `{}`)
	}
	d := loops.New(events.AgentSpec{})
	if got := outcome(d, j.list); got != "" {
		t.Fatalf("before any result: %s", got)
	}
	for _, c := range []struct{ id, want string }{{"4", ""}, {"0", ""}, {"2", "main: read 3 of 3/5"}, {"3", ""}, {"1", "LOOP_DETECTED"}} {
		j.list = nil
		j.end(conversation, c.id, "x", false)
		if got := outcome(d, j.list); got != c.want {
			t.Errorf("after the result of call %s: %q, want %q", c.id, got, c.want)
		}
	}
}

// TestDetector_ACallThatRunsEndsTheSeries: another call ends the series when it is made, not when it returns.
func TestDetector_ACallThatRunsEndsTheSeries(t *testing.T) {
	t.Parallel()
	var j journal
	j.call("main", "read = x")
	j.call("main", "read = x")
	j.start("main", "slow", "build", `{}`)
	j.call("main", "read = x")
	j.call("main", "read = x")
	if got := outcome(loops.New(events.AgentSpec{}), j.list); got != "" {
		t.Error(got)
	}
}

// TestDetector_TellsConversationsApart: calls of the agent and of its sub-agents do not add up, and one agent's calls do not end the series of
// another one.
func TestDetector_TellsConversationsApart(t *testing.T) {
	t.Parallel()
	var j journal
	for range 2 {
		for _, c := range []string{"main", "sub-1", "sub-2"} {
			j.call(c, "read = x")
		}
	}
	d := loops.New(events.AgentSpec{})
	if got := outcome(d, j.list); got != "" {
		t.Fatal(got)
	}
	j.list = nil
	j.call("sub-2", "read = x")
	if got := outcome(d, j.list); got != "sub-2: read 3 of 3/5" {
		t.Error(got)
	}
	j.list = nil
	j.add("main", events.SubagentCompleted{Conversation: "sub-2"})
	j.call("sub-2", "read = x")
	if got := outcome(d, j.list); got != "" {
		t.Errorf("after the end of the sub-agent: %s", got)
	}
}

// TestDetector_CountsStartsOfSubagents: the start of a sub-agent is a call, and its answer the result.
func TestDetector_CountsStartsOfSubagents(t *testing.T) {
	t.Parallel()
	var j journal
	for i := range 3 {
		b := events.Block{ID: fmt.Sprint(i), Kind: events.KindSubagent, Status: events.StatusPending, ToolUseID: fmt.Sprint(i), Name: "searcher", Input: json.RawMessage(`{"prompt":"look"}`)}
		j.add("main", events.BlockStart{Block: b})
		b.Status, b.Output = events.StatusComplete, "nothing"
		j.add("main", events.BlockComplete{Block: b})
	}
	if got := outcome(loops.New(events.AgentSpec{}), j.list); got != "main: sub-agent searcher 3 of 3/5" {
		t.Error(got)
	}
}

// TestDetector_IgnoresWhatTheExecutorWrites: results that an executor writes for blocks that were open at the death of an attempt are no results.
func TestDetector_IgnoresWhatTheExecutorWrites(t *testing.T) {
	t.Parallel()
	var j journal
	for range 5 {
		j.call("main", "read = x")
	}
	for i := range j.list {
		j.list[i].N = 0
	}
	if got := outcome(loops.New(events.AgentSpec{}), j.list); got != "" {
		t.Error(got)
	}
}

// TestDetector_BeginsAnewWithAnAttempt: calls of a process that has died do not count, and a repeated line about the same attempt changes nothing.
func TestDetector_BeginsAnewWithAnAttempt(t *testing.T) {
	t.Parallel()
	var j journal
	for attempt := range uint32(6) {
		j.add("main", events.ExecutionStarted{Attempt: attempt + 1})
		j.call("main", "read = x")
		j.add("main", events.ExecutionStarted{Attempt: attempt + 1})
		j.call("main", "read = x")
	}
	d := loops.New(events.AgentSpec{})
	if got := outcome(d, j.list); got != "" {
		t.Error(got)
	}
	j.list = nil
	j.call("main", "read = x")
	if got := outcome(d, j.list); got != "main: read 3 of 3/5" {
		t.Error(got)
	}
}

// TestDetector_StopsDeepSubagents: a sub-agent below the last allowed level stops the execution.
func TestDetector_StopsDeepSubagents(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit  uint32
		levels int
		want   string
	}{
		"the default":         {levels: events.DefaultSubagentDepth},
		"beyond the default":  {levels: events.DefaultSubagentDepth + 1, want: "RECURSION_LIMIT"},
		"a limit":             {limit: 1, levels: 1},
		"beyond a limit":      {limit: 1, levels: 2, want: "RECURSION_LIMIT"},
		"beyond a high limit": {limit: 20, levels: 21, want: "RECURSION_LIMIT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j journal
			parent := "main"
			for i := range c.levels {
				child := fmt.Sprint("sub-", i)
				j.add(parent, events.SubagentSpawned{Conversation: child, Parent: parent, Name: "digger"})
				j.add(parent, events.SubagentSpawned{Conversation: child + "-sibling", Parent: parent, Name: "digger"})
				parent = child
			}
			got := outcome(loops.New(events.AgentSpec{Limits: events.Limits{SubagentDepth: c.limit}, Loops: events.Loops{Action: "none"}}), j.list)
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// The runner knows the level of a sub-agent below one that an earlier execution has started. It cannot make the level lower.
func TestDetector_CountsTheDepthThatTheRunnerStates(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		parent string
		depth  uint32
		code   string
	}{
		"an unknown parent":           {"earlier", 0, ""},
		"an unknown parent, too deep": {"earlier", 3, loops.CodeRecursion},
		"at the limit":                {"earlier", 2, ""},
		"a known parent":              {"b", 1, loops.CodeRecursion},
	} {
		d := loops.New(events.AgentSpec{Limits: events.Limits{SubagentDepth: 2}})
		d.HandleEvent(events.Event{N: 1, Data: events.SubagentSpawned{Conversation: "a", Parent: "main"}})
		d.HandleEvent(events.Event{N: 2, Data: events.SubagentSpawned{Conversation: "b", Parent: "a"}})
		if got := d.HandleEvent(events.Event{N: 3, Data: events.SubagentSpawned{Conversation: "c", Parent: tc.parent, Depth: tc.depth}}).Code; got != tc.code {
			t.Errorf("%s: code %q, want %q", name, got, tc.code)
		}
	}
}

// TestDetector_NamesToolAndCount: the message of a stop has the tool, the number of calls and the field with the limit.
func TestDetector_NamesToolAndCount(t *testing.T) {
	t.Parallel()
	var j journal
	for range 2 {
		j.call("main", "read = x")
	}
	d := loops.New(agent(events.Loops{Stop: 2}))
	var last loops.Finding
	for _, e := range j.list {
		last = d.HandleEvent(e)
	}
	const want = "the agent called read 2 times in a row with the same arguments and the same result; the limit is 2 (loops.stop)"
	if last.Code != loops.CodeLoop || last.Message != want {
		t.Errorf("%q, %q", last.Code, last.Message)
	}
	d = loops.New(events.AgentSpec{Limits: events.Limits{SubagentDepth: 1}})
	d.HandleEvent(events.Event{N: 1, Data: events.SubagentSpawned{Conversation: "a", Parent: "main"}})
	last = d.HandleEvent(events.Event{N: 2, Data: events.SubagentSpawned{Conversation: "b", Parent: "a", Name: "digger"}})
	if last.Code != loops.CodeRecursion || last.Message != `sub-agent "digger" was started 2 levels below the agent; the limit is 1 (limits.subagentDepth)` {
		t.Errorf("%q, %q", last.Code, last.Message)
	}
}

// TestDetector_KeepsNoLargeValues: long names and ids are cut or ignored, and the number of conversations is limited.
func TestDetector_KeepsNoLargeValues(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	var j journal
	for range 3 {
		j.call("main", long+" = x")
		j.call(long, "read = x")
	}
	d := loops.New(events.AgentSpec{})
	for _, e := range j.list {
		if f := d.HandleEvent(e); f.Warning != nil && (f.Conversation != "main" || len(f.Warning.ToolName) > 200) {
			t.Errorf("a warning about %d bytes in %.10s", len(f.Warning.ToolName), f.Conversation)
		}
	}
	j.list = nil
	for i := range 2000 {
		for range 3 {
			j.call(fmt.Sprint("sub-", i), "read = x")
		}
	}
	if got := strings.Count(outcome(d, j.list), "read 3"); got != 999 {
		t.Errorf("%d conversations are looked at besides the agent's, want 999", got)
	}
}

// TestRestore_ContinuesAtAnyEvent: a Detector that another one's events and warnings restore finds the rest, and nothing twice. A warning or a
// stop that the first one found and could not store is pending.
func TestRestore_ContinuesAtAnyEvent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := draw(t)
		var want []string
		var log []events.Event
		first := loops.New(events.AgentSpec{})
		cut := rapid.IntRange(0, len(list)).Draw(t, "cut")
		lost := rapid.Bool().Draw(t, "the last warning is lost")
		for i, e := range list {
			f := first.HandleEvent(e)
			if i < cut {
				log = append(log, e)
			}
			if f.Warning != nil {
				want = append(want, warning(f))
				if i < cut-1 || i == cut-1 && !lost {
					log = append(log, events.Event{ConversationID: f.Conversation, Data: *f.Warning})
				}
			}
		}
		second := loops.New(events.AgentSpec{})
		var got []string
		for _, e := range log {
			second.RestoreEvent(e)
			if w, ok := e.Data.(events.LoopDetected); ok {
				got = append(got, warning(loops.Finding{Warning: &w, Conversation: e.ConversationID}))
			}
		}
		for _, f := range second.PendingFindings() {
			if f.Warning != nil {
				got = append(got, warning(f))
			}
		}
		for _, e := range list[cut:] {
			if f := second.HandleEvent(e); f.Warning != nil {
				got = append(got, warning(f))
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("cut after %d: %q, want %q", cut, got, want)
		}
	})
}

func warning(f loops.Finding) string {
	return fmt.Sprint(f.Conversation, " ", *f.Warning)
}

// draw returns the events of some calls of few tools with few results, in few conversations.
func draw(t *rapid.T) []events.Event {
	var j journal
	for range rapid.IntRange(0, 40).Draw(t, "calls") {
		conversation := rapid.SampledFrom([]string{"main", "sub"}).Draw(t, "conversation")
		tool := rapid.SampledFrom([]string{"a", "a", "a", "b"}).Draw(t, "tool")
		result := rapid.SampledFrom([]string{"x", "x", "x", "y"}).Draw(t, "result")
		j.call(conversation, tool+" = "+result)
	}
	return j.list
}

// TestDetector_MatchesAModel: the Detector finds what a simple count over all calls finds.
func TestDetector_MatchesAModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := loops.New(events.AgentSpec{})
		last, n := map[string]string{}, map[string]int{}
		var j journal
		for range rapid.IntRange(0, 60).Draw(t, "calls") {
			conversation := rapid.SampledFrom([]string{"main", "sub"}).Draw(t, "conversation")
			call := rapid.SampledFrom([]string{"a {} = x", "a {} = x", "a {} = y", "b {} = x"}).Draw(t, "call")
			if n[conversation]++; last[conversation] != call {
				n[conversation] = 1
			}
			last[conversation] = call
			j.list = nil
			j.call(conversation, call)
			var warned, stopped bool
			for _, e := range j.list {
				f := d.HandleEvent(e)
				warned, stopped = warned || f.Warning != nil, stopped || f.Code == loops.CodeLoop
			}
			if warned != (n[conversation] == 3) || stopped != (n[conversation] == 5) {
				t.Fatalf("call %d in a row: warned %v, stopped %v", n[conversation], warned, stopped)
			}
			if stopped {
				return
			}
		}
	})
}
