package fork_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/fork"
)

// story builds the events of a session from words. One word is one event.
//
// create begin fork opts:X  put:N  remove:N  sync:ID[/APPLIED]
// accept:E claim:E end:E withdraw:E     of execution E
// text[:A] call:C[:A] open:C result:C[:A] of the execution that was claimed last, with anchor A
// ask:R decide:R resolve:R retract:R     approval request R of the execution that was claimed last
// talk:S                                 transcript_written with the agent's own session S
// log delete
func story(words string) []events.Event {
	var list []events.Event
	execution := ""
	block := func(kind events.BlockKind, call, anchor string) events.Payload {
		return events.BlockComplete{Block: events.Block{Kind: kind, Status: events.StatusComplete, ToolUseID: call, Anchor: anchor}}
	}
	for _, word := range strings.Fields(words) {
		part := append(strings.Split(word, ":"), "", "", "")
		e := events.Event{ExecutionID: execution, ConversationID: events.MainConversation}
		var n uint32
		switch what, arg := part[0], part[1]; what {
		case "create":
			e.Data = events.SessionCreated{Agent: "a", Architecture: "spool"}
		case "begin":
			e.Data = events.SessionCreated{Agent: "a", Architecture: "codex", Transcript: &events.Transcript{Object: "o"}}
		case "fork":
			e.Data = events.SessionForked{Parent: "P", Snapshot: "s0", Records: "r0", AgentSessionID: "t0", Anchor: "a0", RecordsSession: "G"}
		case "opts":
			e.Data = events.SessionOptionsUpdated{Options: events.Options{Model: arg}, Metadata: []byte(`"` + arg + `"`)}
		case "put":
			fmt.Sscan(arg, &n) //nolint:errcheck // only this file calls it, with numbers
			e.Data = events.FilePut{N: n}
		case "remove":
			fmt.Sscan(arg, &n) //nolint:errcheck // only this file calls it, with numbers
			e.Data = events.FileRemoved{N: n}
		case "sync":
			id, applied, _ := strings.Cut(arg, "/")
			fmt.Sscan(applied, &n) //nolint:errcheck // only this file calls it, with numbers
			e.Data = events.WorkspaceSynced{Snapshot: id, Applied: n}
		case "accept":
			e.ExecutionID, e.Data = arg, events.MessageAccepted{}
		case "claim":
			execution = arg
			e.ExecutionID, e.Data = arg, events.ExecutionClaimed{}
		case "end":
			e.ExecutionID, e.Data = arg, events.ExecutionCompleted{}
		case "withdraw":
			e.ExecutionID, e.Data = arg, events.ExecutionWithdrawn{}
		case "text":
			e.Data = block(events.KindAssistantText, "", arg)
		case "call":
			e.Data = block(events.KindToolUse, arg, part[2])
		case "open":
			e.Data = events.BlockStart{Block: events.Block{Kind: events.KindToolUse, Status: events.StatusPending, ToolUseID: arg}}
		case "result":
			e.Data = block(events.KindToolResult, arg, part[2])
		case "sub": // a block of a sub-agent's conversation
			e.ConversationID, e.Data = "sub", block(events.KindToolUse, arg, part[2])
		case "ask":
			e.Data = events.ApprovalRequested{ApprovalID: arg}
		case "decide":
			e.Data = events.ApprovalDecided{ApprovalID: arg}
		case "resolve":
			e.Data = events.ApprovalResolved{ApprovalID: arg}
		case "retract":
			e.Data = events.ApprovalRetracted{ApprovalID: arg}
		case "talk":
			e.Data = events.TranscriptWritten{AgentSessionID: arg}
		case "log":
			e.Data = events.Log{}
		case "delete":
			e.Data = events.SessionDeleted{}
		default:
			panic(word)
		}
		list = append(list, e)
	}
	return list
}

// walk passes the events to a Finder until the Finder is settled, and returns the fork point.
func walk(list []events.Event, asked uint32) (fork.ForkPoint, error) {
	w := fork.NewFinder(asked)
	for i, e := range list {
		if w.Add(uint32(i+1), e); w.IsSettled() {
			break
		}
	}
	return w.ForkPoint()
}

func TestForkPoint_FindsFilesRecordsAndAnchor(t *testing.T) {
	t.Parallel()
	const turns = "create accept:A claim:A text talk:t end:A sync:s1 accept:B claim:B text call:c result:c talk:t end:B sync:s2 "
	const anchored = "create accept:A claim:A talk:t text:a1 call:c:a2 result:c:a3 text:a4 end:A sync:s1 "
	for _, c := range []struct {
		name  string
		story string
		at    uint32
		want  string // effective, files@seq, records, agent, anchor
	}{
		{"before the first message", turns, 1, "1 @0   "},
		{"at a message that is not answered", turns, 2, "1 @0   "},
		{"in a turn without anchors", turns, 4, "1 @0   "},
		{"at the end of an execution, with the snapshot that follows it", turns, 6, "6 s1@7 s1 t "},
		{"at the snapshot", turns, 7, "7 s1@7 s1 t "},
		{"at the next message", turns, 8, "7 s1@7 s1 t "},
		{"in the second turn", turns, 12, "7 s1@7 s1 t "},
		{"at the end of the second", turns, 14, "14 s2@15 s2 t "},
		{"at the tip", turns, fork.LastEvent, "15 s2@15 s2 t "},
		{"after the end, before its snapshot", "create accept:A claim:A talk:t end:A log log", 7, "1 @0   "},
		{"a turn without a snapshot after it", "create accept:A claim:A talk:t end:A accept:B claim:B talk:t end:B sync:s", 5, "1 @0   "},
		{"a turn without a transcript", "create accept:A claim:A end:A log", 5, "5 @0   "},
		{"a message that was withdrawn", "create accept:A withdraw:A log", 4, "4 @0   "},
		{"while a message waits", "create accept:A claim:A talk:t accept:B end:A sync:s claim:B end:B", 7, "6 s@7 s t "},
		{"at a text", anchored, 5, "5 @0 s1 t a1"},
		{"at a call", anchored, 6, "5 @0 s1 t a1"},
		{"at a result", anchored, 7, "7 @0 s1 t a3"},
		{"a transcript that comes after the block", "create accept:A claim:A text:a1 talk:t end:A sync:s", 4, "4 @0 s t a1"},
		{"calls at once", "create accept:A claim:A talk:t text:a1 call:c:a2 call:d:a3 result:d:a4 result:c:a5 end:A sync:s", 8, "5 @0 s t a1"},
		{"a call that is open", "create accept:A claim:A talk:t text:a1 open:c text:a2 end:A sync:s", 7, "5 @0 s t a1"},
		{"a call that waits for an approval", "create accept:A claim:A talk:t text:a1 ask:r text:a2 end:A sync:s", 7, "5 @0 s t a1"},
		{"an approval that is decided and not received", "create accept:A claim:A talk:t text:a1 ask:r decide:r text:a2 end:A sync:s", 8, "5 @0 s t a1"},
		{"an approval that was received", "create accept:A claim:A talk:t text:a1 ask:r decide:r resolve:r text:a2 end:A sync:s", 9, "9 @0 s t a2"},
		{"an approval that was retracted", "create accept:A claim:A talk:t text:a1 ask:r retract:r text:a2 end:A sync:s", 8, "8 @0 s t a2"},
		{"an approval that ended with its execution", "create accept:A claim:A talk:t text:a1 ask:r end:A sync:s accept:B claim:B text:b1 end:B sync:u", 11, "11 s@8 u t b1"},
		{"a call of a sub-agent", "create accept:A claim:A talk:t text:a1 sub:c:a2 text:a3 end:A sync:s", 7, "7 @0 s t a3"},
		{"while it runs: a later anchor came before the snapshot", "create accept:A claim:A talk:t text:a1 text:a2 sync:s log", 8, "5 @0 s t a1"},
		{"while it runs: no later anchor", "create accept:A claim:A talk:t text:a1 sync:s log", 7, "1 @0   "},
		{"while it runs: the snapshot comes later", "create accept:A claim:A talk:t text:a1 log text:a2 sync:s", 6, "5 @0 s t a1"},
		{"an anchored turn without a snapshot of its own", "create accept:A claim:A talk:t text:a1 end:A accept:B claim:B text:b1 text:b2 sync:s", 6, "5 @0 s t a1"},
		{"a change after the snapshot", turns + "put:1 remove:2", fork.LastEvent, "17 s2@15 s2 t  +1 -2"},
		{"changes that the snapshot holds", "create put:1 accept:A claim:A talk:t end:A put:2 sync:s/2 put:3", 9, "9 s@8 s t  +3"},
		{"a change after the point that the snapshot holds", "create put:1 accept:A claim:A talk:t end:A put:2 sync:s/2", 6, "6 @0 s t  +1"},
		{"a fork of a fork that never ran", "create fork", fork.LastEvent, "2 s0@0/P r0/G t0 a0"},
		{"a fork of a fork at its first event", "create fork put:1", 1, "1 s0@0/P r0/G t0 a0"},
		{"a fork of a fork within its first turn, before its own transcript", "create fork accept:A claim:A text:b1 log", 6, "2 s0@0/P r0/G t0 a0"},
		{"a fork of a fork that ran", "create fork accept:A claim:A talk:u text:b1 end:A sync:s", 6, "6 s0@0/P s u b1"},
		{"a fork of a fork whose agent never began", "create fork accept:A claim:A end:A sync:s", fork.LastEvent, "6 s@6 r0/G t0 a0"},
		{"closed is no end of it", turns + "log", fork.LastEvent, "16 s2@15 s2 t "},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cut, err := walk(story(c.story), c.at)
			if err != nil {
				t.Fatal(err)
			}
			if got := describe(cut); got != c.want {
				t.Errorf("cut at %q, want %q", got, c.want)
			}
			if f := cut.Forked; (f.Reason == "") != (f.Effective == f.Asked) {
				t.Errorf("effective %d, asked %d, reason %q", f.Effective, f.Asked, f.Reason)
			}
		})
	}
}

func describe(c fork.ForkPoint) string {
	of := func(session string) string {
		if session != "" {
			return "/" + session
		}
		return ""
	}
	f := c.Forked
	s := fmt.Sprintf("%d %s@%d%s %s%s %s %s", f.Effective, f.Snapshot, f.SnapshotSeq, of(f.SnapshotSession), f.Records, of(f.RecordsSession), f.AgentSessionID, f.Anchor)
	for _, change := range c.Changes {
		switch d := change.(type) {
		case events.FilePut:
			s += fmt.Sprintf(" +%d", d.N)
		case events.FileRemoved:
			s += fmt.Sprintf(" -%d", d.N)
		}
	}
	return s
}

func TestForkPoint_OptionsAsOfTheEvent(t *testing.T) {
	t.Parallel()
	list := story("create opts:m1 accept:A claim:A talk:t end:A sync:s opts:m2")
	for at, want := range map[uint32]string{1: "", 2: "m1", 5: "m1", 7: "m1", 8: "m2"} {
		cut, err := walk(list, at)
		if err != nil || cut.Created.Options.Model != want || want != "" && string(cut.Created.Metadata) != `"`+want+`"` {
			t.Errorf("at %d the model is %q with metadata %s, %v; want %q", at, cut.Created.Options.Model, cut.Created.Metadata, err, want)
		}
	}
}

// TestForkPoint_TranscriptUntilTheAgentHasASession tests that a fork begins with the transcript of its parent until a
// snapshot contains the agent's records.
func TestForkPoint_TranscriptUntilTheAgentHasASession(t *testing.T) {
	t.Parallel()
	list := story("begin accept:A claim:A end:A sync:s1 accept:B claim:B talk:t text:a1 text:a2 sync:s2 end:B sync:s3")
	for at, want := range map[uint32]bool{1: true, 4: true, 5: true, 7: true, 9: false, 12: false} {
		cut, err := walk(list, at)
		if err != nil || (cut.Created.Transcript != nil) != want || want == (cut.Forked.AgentSessionID != "") {
			t.Errorf("at %d the fork begins with the transcript %+v and the agent's session %q, %v", at, cut.Created.Transcript, cut.Forked.AgentSessionID, err)
		}
	}
}

func TestForkPoint_Refuses(t *testing.T) {
	t.Parallel()
	var ahead *fork.SeqAheadError
	if _, err := walk(story("create log"), 3); !errors.As(err, &ahead) || ahead.LastSeq != 2 {
		t.Errorf("ahead: %v", err)
	}
	if _, err := walk(story("create log"), 0); !errors.Is(err, fork.ErrSeqZero) {
		t.Errorf("0: %v", err)
	}
	for _, words := range []string{"", "create log delete"} {
		if _, err := walk(story(words), fork.LastEvent); !errors.Is(err, fork.ErrNoSession) {
			t.Errorf("%q: %v", words, err)
		}
	}
}

func TestForkPoint_WaitsForTheSnapshotAfterATurn(t *testing.T) {
	t.Parallel()
	for words, want := range map[string]bool{
		"create accept:A claim:A talk:t end:A":                  true,
		"create accept:A claim:A talk:t end:A sync:s":           false,
		"create accept:A claim:A talk:t end:A accept:B claim:B": false,
		"create accept:A claim:A talk:t text:a":                 false,
	} {
		if cut, err := walk(story(words), fork.LastEvent); err != nil || cut.Waits != want {
			t.Errorf("%s: waits %v, %v", words, cut.Waits, err)
		}
	}
}

// session draws a session as executors and clients write it.
func session(t *rapid.T) []string {
	words := []string{"create"}
	if rapid.Bool().Draw(t, "fork") {
		words = append(words, "fork")
	}
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	puts, syncs, anchors := 0, 0, 0
	other := func() {
		switch rapid.IntRange(0, 4).Draw(t, "other") {
		case 0:
			puts++
			add("put:%d", puts)
		case 1:
			syncs++
			add("sync:s%d/%d", syncs, rapid.IntRange(0, puts).Draw(t, "applied"))
		case 2:
			add("log")
		}
	}
	anchor := func() string {
		if rapid.IntRange(0, 3).Draw(t, "anchored") == 0 {
			return ""
		}
		anchors++
		return fmt.Sprintf(":a%d", anchors)
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "turns") {
		x := fmt.Sprintf("X%d", i)
		other()
		add("accept:%s", x)
		if rapid.IntRange(0, 5).Draw(t, "withdrawn") == 0 {
			add("withdraw:%s", x)
			continue
		}
		add("claim:%s", x)
		if rapid.Bool().Draw(t, "early") {
			add("talk:t")
		}
		for j := range rapid.IntRange(0, 5).Draw(t, "blocks") {
			add("text%s", anchor())
			other()
			if rapid.Bool().Draw(t, "call") {
				add("call:%s.%d%s", x, j, anchor())
				other()
				if rapid.IntRange(0, 4).Draw(t, "lost") > 0 {
					add("result:%s.%d%s", x, j, anchor())
				}
			}
		}
		if rapid.Bool().Draw(t, "late") {
			add("talk:t")
		}
		if rapid.IntRange(0, 6).Draw(t, "running") == 0 {
			return words
		}
		add("end:%s", x)
		other()
	}
	return words
}

// TestForkPoint_Properties tests that the cut of any session at any event is sound.
func TestForkPoint_Properties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		words := session(t)
		list := story(strings.Join(words, " "))
		asked := uint32(rapid.IntRange(1, len(list)).Draw(t, "asked"))
		cut, err := walk(list, asked)
		if err != nil {
			t.Fatal(err)
		}
		whole := fork.NewFinder(asked)
		for i, e := range list {
			whole.Add(uint32(i+1), e)
		}
		if all, err := whole.ForkPoint(); err != nil || !reflect.DeepEqual(all, cut) {
			t.Fatalf("a walk that ended early cut at %+v, one to the end at %+v, %v", cut, all, err)
		}
		check(t, words, list, asked, cut)
		// A copy of a walk from any event up to the requested one continues independently of the original.
		base := fork.NewFinder(fork.LastEvent)
		from := rapid.IntRange(0, int(asked)).Draw(t, "from")
		var clones []*fork.Finder
		for i, e := range list {
			if i == from {
				clones = []*fork.Finder{base.Clone(asked), base.Clone(fork.LastEvent).Clone(asked)}
			}
			base.Add(uint32(i+1), e)
		}
		if from == len(list) {
			clones = []*fork.Finder{base.Clone(asked), base.Clone(fork.LastEvent).Clone(asked)}
		}
		for _, w := range clones {
			for i := from; i < len(list) && !w.IsSettled(); i++ {
				w.Add(uint32(i+1), list[i])
			}
			if again, err := w.ForkPoint(); err != nil || !reflect.DeepEqual(again, cut) {
				t.Fatalf("a walk from event %d cut at %+v, one from the first at %+v, %v", from, again, cut, err)
			}
		}
	})
}

// check checks a fork point against the events, without the Finder.
func check(t *rapid.T, words []string, list []events.Event, asked uint32, cut fork.ForkPoint) {
	f := cut.Forked
	at := int(f.Effective)
	if f.Asked != asked || f.Effective > asked || f.Effective == 0 {
		t.Fatalf("effective %d, asked %d", f.Effective, f.Asked)
	}
	claimed, ended, syncs := "", 0, map[string]int{}
	open := map[string]bool{}
	for i, e := range list {
		if d, ok := e.Data.(events.WorkspaceSynced); ok {
			syncs[d.Snapshot] = i + 1
		}
		if i >= at {
			continue
		}
		switch d := e.Data.(type) {
		case events.ExecutionClaimed:
			claimed = e.ExecutionID
		case events.ExecutionCompleted:
			claimed, ended = "", i+1
			clear(open)
		case events.BlockComplete:
			switch d.Block.Kind {
			case events.KindToolUse:
				open[d.Block.ToolUseID] = true
			case events.KindToolResult:
				delete(open, d.Block.ToolUseID)
			}
		}
	}
	if len(open) > 0 {
		t.Fatalf("%s\ncut at %d, where the calls %v have no result", words, at, open)
	}
	between := func(from, to int, what events.Payload) bool { // both ends are exclusive
		for i := from + 1; i < to; i++ {
			if list[i-1].Type() == what.EventType() {
				return true
			}
		}
		return false
	}
	if seq := int(f.SnapshotSeq); seq > at && (claimed != "" || between(at, seq, events.ExecutionClaimed{})) {
		t.Fatalf("%s\nthe files of %d are of later than %d", words, seq, at)
	} else if seq != 0 && (list[seq-1].Data.(events.WorkspaceSynced).Snapshot != f.Snapshot || between(seq, at+1, events.WorkspaceSynced{})) {
		t.Fatalf("%s\nthe snapshot of %d is not the nearest one to %d", words, seq, at)
	}
	for _, change := range cut.Changes {
		if n := change.(events.FilePut).N; f.SnapshotSeq != 0 && n <= list[f.SnapshotSeq-1].Data.(events.WorkspaceSynced).Applied {
			t.Fatalf("%s\nchange %d is in the snapshot already", words, n)
		}
	}
	if f.AgentSessionID != "t" { // a new conversation, or the conversation with which a fork began
		return
	}
	records := syncs[f.Records]
	switch {
	case records == 0:
		t.Fatalf("%s\nthe records are of no snapshot", words)
	case f.Anchor == "" && (claimed != "" || records < ended || between(ended, records, events.ExecutionClaimed{})):
		t.Fatalf("%s\ncut at %d with the whole records of %d", words, at, records)
	case f.Anchor != "":
		later := between(at, records, events.ExecutionCompleted{})
		for i := at + 1; i < records; i++ {
			d, ok := list[i-1].Data.(events.BlockComplete)
			later = later || ok && d.Block.Anchor != ""
		}
		if d, ok := list[at-1].Data.(events.BlockComplete); !ok || d.Block.Anchor != f.Anchor || !later {
			t.Fatalf("%s\ncut at %d after anchor %s with the records of %d", words, at, f.Anchor, records)
		}
	}
}
