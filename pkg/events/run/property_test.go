package run_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// world is the log of one session with guarded appends, and everything that writes to it: commands of gateways, the
// reactor, and executors. An executor works on the states that it loaded, which may be stale when it writes.
type world struct {
	t       *rapid.T
	now     time.Time
	seq     uint64
	life    chain[session.State]
	run     chain[run.State]
	ids     int
	sent    []session.Command // commands that may be delivered again
	holders []*executor
}

// chain is one subject: its events and the state after each commit.
type chain[S any] struct {
	last   uint64
	states []S // states[i] is the state after i commits
	seqs   []uint64
	list   []events.Event
}

func (c *chain[S]) state() S { return c.states[len(c.states)-1] }

// current returns the current state, which the caller must not change.
func (c *chain[S]) current() *S { return &c.states[len(c.states)-1] }

var errConflict = errors.New("conflict")

// loaded holds the states of both subjects as a reader loaded them, possibly stale.
type loaded struct {
	life    session.State
	lifeSeq uint64
	run     run.State
	runSeq  uint64
}

func newWorld(t *rapid.T) *world {
	w := &world{t: t, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	w.life.states, w.life.seqs = []session.State{{}}, []uint64{0}
	w.run.states, w.run.seqs = []run.State{{}}, []uint64{0}
	w.command(session.CreateSession{CommandBase: w.base(), SessionCreated: events.SessionCreated{
		Architecture: "spool", Provider: "local",
		Options: events.Options{IdleTimeoutMs: 60_000, TurnLimitMs: 600_000, SessionLimitMs: 86_400_000},
	}})
	for i := range 3 {
		w.holders = append(w.holders, &executor{w: w, id: fmt.Sprintf("x%d", i)})
	}
	return w
}

func (w *world) id(what string) string { w.ids++; return fmt.Sprintf("%s%d", what, w.ids) }
func (w *world) base() session.CommandBase {
	return session.CommandBase{CommandMeta: events.CommandMeta{CommandID: w.id("c"), Now: w.now}}
}

// load returns both states. If stale, each is up to three commits old, independently of the other.
func (w *world) load(stale bool) loaded {
	back := func(n int) int {
		if !stale {
			return n - 1
		}
		return max(0, n-1-rapid.IntRange(0, 3).Draw(w.t, "stale"))
	}
	i, j := back(len(w.life.states)), back(len(w.run.states))
	return loaded{w.life.states[i], w.life.seqs[i], w.run.states[j], w.run.seqs[j]}
}

func (w *world) appendLife(l loaded, command string, list []events.Event) error {
	if l.lifeSeq != w.life.last {
		return errConflict
	}
	w.seq++
	next := session.Fold(l.life, session.CommitID(command), list).WithCommitSeq(w.seq)
	w.life = chain[session.State]{w.seq, append(w.life.states, next), append(w.life.seqs, w.seq), append(w.life.list, list...)}
	return nil
}

func (w *world) appendRun(l loaded, d run.Decision) error {
	if l.runSeq != w.run.last {
		return errConflict
	}
	w.seq++
	next := run.Fold(l.run, d.Epoch, d.Events).WithCommitSeq(w.seq)
	w.run = chain[run.State]{w.seq, append(w.run.states, next), append(w.run.seqs, w.seq), append(w.run.list, d.Events...)}
	return nil
}

// command handles a command like the session service: it loads (possibly stale), decides and appends, and repeats
// after a conflict.
func (w *world) command(c session.Command) {
	stale := rapid.Bool().Draw(w.t, "stale read")
	for {
		l := w.load(stale)
		stale = false
		list, err := session.Decide(l.life, refresh(c, l))
		if err != nil || len(list) == 0 {
			return
		}
		if w.appendLife(l, idOf(c), list) == nil {
			return
		}
	}
}

// refresh returns the command with the facts that its handler takes from the loaded states.
func refresh(c session.Command, l loaded) session.Command {
	ended := l.run.IsDone(l.life.Active)
	switch c := c.(type) {
	case session.PostQuery:
		c.ActiveEnded = ended
		return c
	case session.RecoverExecution:
		c.Run = l.run.RunView(&l.life)
		return c
	case session.RequestInterrupt:
		c.ActiveEnded = ended
		return c
	case session.RequestCancel:
		c.ActiveEnded = ended
		return c
	case session.DeleteSession:
		c.ActiveEnded = ended
		return c
	case session.RequestPause:
		c.ActiveEnded = ended
		return c
	case session.RequestResume:
		c.ActiveEnded = ended
		return c
	case session.RequestTerminate:
		c.ActiveEnded, c.HasSandbox = ended, l.run.Sandbox.ID != ""
		return c
	case session.PutFile:
		c.Held = l.run.Snapshot.Applied
		return c
	}
	return c
}

func idOf(c session.Command) string {
	return reflect.ValueOf(c).FieldByName("CommandBase").FieldByName("CommandMeta").FieldByName("CommandID").String()
}

// react does the work of the reactor, which reads from the leader.
func (w *world) react() {
	l := w.load(false)
	view := l.run.RunView(&l.life)
	for _, c := range []session.Command{session.HandleDeadline{CommandBase: w.base(), Run: view}, session.DispatchNext{CommandBase: w.base(), ActiveEnded: view.ActiveEnded}} {
		if list, err := session.Decide(l.life, c); err == nil && len(list) > 0 {
			w.must(w.appendLife(l, idOf(c), list))
			return
		}
	}
	if run.DueWork(&l.life, &l.run) == run.EndUnstarted {
		d, err := run.Decide(l.run, run.AbandonExecution{CommandMeta: w.base().CommandMeta, ExecutionID: l.life.Active.ExecutionID, Turn: l.life.Active.Turn, Outcome: events.ExecutionCancelled{Reason: "x"}})
		w.must(err)
		w.must(w.appendRun(l, d))
	}
}

func (w *world) must(err error) {
	if err != nil {
		w.t.Fatal(err)
	}
}

// executor works on a session that it loaded some time ago.
type executor struct {
	w    *world
	id   string
	has  bool
	l    loaded
	mine uint64 // epoch
	n    uint64
}

// crash makes the executor forget the session.
func (x *executor) crash() { x.has = false }

// step claims the session, writes something, or ends. A conflict stops the executor.
func (x *executor) step() {
	if !x.has {
		x.claim()
		return
	}
	var d run.Decision
	var err error
	if life := x.w.load(false).life; life.ShouldBePaused(x.l.run.Execution) {
		x.pause()
		return
	}
	switch rapid.IntRange(0, 2).Draw(x.w.t, "what") {
	case 0, 1:
		x.n++
		block := events.Block{ID: x.w.id("b"), Kind: events.KindAssistantText, Status: events.StatusPending}
		d, err = run.Decide(x.l.run, run.RecordEvents{Epoch: x.mine, Events: []events.Event{{
			ID: x.w.id("e"), Time: x.w.now, ExecutionID: x.l.run.Execution, Source: events.FromRunner, N: x.l.run.Sandbox.N + 1, Data: events.BlockStart{Block: block},
		}}})
	default:
		outcome := rapid.SampledFrom([]events.Payload{events.ExecutionCompleted{}, events.ExecutionFailed{Code: "MODEL_ERROR"}}).Draw(x.w.t, "outcome")
		d, err = run.Decide(x.l.run, run.EndExecution{CommandMeta: x.w.base().CommandMeta, Epoch: x.mine, ExecutionID: x.l.run.Execution, Outcome: outcome})
	}
	x.write(d, err)
}

// pause ends the work on an execution that is to be paused.
func (x *executor) pause() {
	m := events.NewEventList(x.w.base().CommandMeta)
	m.Add(x.l.run.Execution, events.ExecutionPaused{})
	d, err := run.Decide(x.l.run, run.RecordEvents{Epoch: x.mine, Events: m.Events()})
	x.write(d, err)
	x.crash()
}

func (x *executor) claim() {
	l := x.w.load(rapid.Bool().Draw(x.w.t, "stale claim"))
	if run.DueWork(&l.life, &l.run) != run.ExecuteTurn {
		return
	}
	d, err := run.Decide(l.run, run.ClaimExecution{CommandMeta: x.w.base().CommandMeta, ExecutionID: l.life.Active.ExecutionID, Turn: l.life.Active.Turn, Executor: x.id})
	x.l, x.mine, x.has = l, d.Epoch, true
	x.write(d, err)
	if x.has && x.l.run.Phase == run.Paused {
		m := events.NewEventList(x.w.base().CommandMeta)
		m.Add(x.l.run.Execution, events.ExecutionResumed{PausedMs: 1})
		d, err := run.Decide(x.l.run, run.RecordEvents{Epoch: x.mine, Events: m.Events()})
		x.write(d, err)
	}
}

func (x *executor) write(d run.Decision, err error) {
	if err == nil && len(d.Events) > 0 {
		err = x.w.appendRun(x.l, d)
	}
	if err != nil {
		x.crash() // the executor is fenced or the execution has ended, so it stops
		return
	}
	x.l.run, x.l.runSeq = x.w.run.state(), x.w.run.last
	if x.l.run.Phase.IsTerminal() {
		x.crash()
	}
}

// TestEveryQueryEndsOnce interleaves both writers at random, with stale reads, redelivered commands and crashes. Each
// accepted query has exactly one terminal event, nothing stays open, and the stored states equal the folds.
func TestEveryQueryEndsOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		for range rapid.IntRange(5, 120).Draw(t, "steps") {
			w.step()
		}
		for range 10_000 {
			if w.drain() {
				break
			}
		}
		w.check()
	})
}

func (w *world) step() {
	w.now = w.now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(w.t, "ms")) * time.Millisecond)
	switch rapid.SampledFrom([]string{"post", "post", "react", "react", "work", "work", "work", "work", "again", "crash", "interrupt", "cancel", "recover", "delete", "pause", "resume", "terminate", "put"}).Draw(w.t, "step") {
	case "post":
		w.send(session.PostQuery{CommandBase: w.base(), ExecutionID: w.id("exe"), Content: "hello"})
	case "recover":
		w.send(session.RecoverExecution{CommandBase: w.base(), ExecutionID: w.id("exe"), Failed: w.load(false).life.Active.ExecutionID, Message: events.MessageAccepted{Content: "hello"}})
	case "interrupt":
		w.send(session.RequestInterrupt{CommandBase: w.base()})
	case "cancel":
		l := w.load(false)
		targets := []string{l.life.Active.ExecutionID}
		for _, r := range l.life.Queue {
			targets = append(targets, r.ExecutionID)
		}
		w.send(session.RequestCancel{CommandBase: w.base(), ExecutionID: rapid.SampledFrom(targets).Draw(w.t, "target")})
	case "pause", "resume", "terminate", "put":
		w.environment()
	case "delete":
		if rapid.IntRange(0, 9).Draw(w.t, "really") == 0 {
			w.send(session.DeleteSession{CommandBase: w.base()})
		}
	case "again":
		if len(w.sent) > 0 {
			w.command(rapid.SampledFrom(w.sent).Draw(w.t, "redelivered"))
		}
	case "react":
		w.react()
	case "work":
		rapid.SampledFrom(w.holders).Draw(w.t, "executor").step()
	case "crash":
		rapid.SampledFrom(w.holders).Draw(w.t, "victim").crash()
	}
}

// environment sends a command about the sandbox.
func (w *world) environment() {
	active := w.load(false).life.Active.ExecutionID
	w.send(rapid.SampledFrom([]session.Command{
		session.RequestPause{CommandBase: w.base(), ExecutionID: active},
		session.RequestResume{CommandBase: w.base(), ExecutionID: active},
		session.RequestTerminate{CommandBase: w.base(), ExecutionID: active},
		session.PutFile{CommandBase: w.base(), FileUpload: session.FileUpload{Path: "f"}},
	}).Draw(w.t, "environment"))
}

func (w *world) send(c session.Command) {
	w.sent = append(w.sent, c)
	w.command(c)
}

// drain runs the reactor and the executors, and reports whether nothing is left to do.
func (w *world) drain() bool {
	before := w.seq
	w.react()
	if w.seq != before {
		return false
	}
	l := w.load(false)
	if active := l.life.Active.ExecutionID; l.life.ShouldBePaused(active) && !l.run.IsDone(l.life.Active) {
		w.command(session.RequestResume{CommandBase: w.base(), ExecutionID: active})
		return false
	}
	if run.DueWork(&l.life, &l.run) != run.ExecuteTurn {
		return true
	}
	x := &executor{w: w, id: "last"}
	d, err := run.Decide(l.run, run.ClaimExecution{CommandMeta: w.base().CommandMeta, ExecutionID: l.life.Active.ExecutionID, Turn: l.life.Active.Turn, Executor: x.id})
	w.must(err)
	w.must(w.appendRun(l, d))
	l = w.load(false)
	if l.run.Phase.IsTerminal() {
		return false
	}
	d, err = run.Decide(l.run, run.EndExecution{CommandMeta: w.base().CommandMeta, Epoch: l.run.Epoch, ExecutionID: l.run.Execution, Outcome: events.ExecutionCompleted{}})
	w.must(err)
	w.must(w.appendRun(l, d))
	return false
}

func (w *world) check() {
	accepted, ends, open := map[string]int{}, map[string]int{}, map[string]bool{}
	recovered := map[string]bool{}
	ids := map[string]bool{}
	for _, e := range append(append([]events.Event(nil), w.life.list...), w.run.list...) {
		if ids[e.ID] {
			w.t.Fatalf("event id %s twice", e.ID)
		}
		ids[e.ID] = true
		switch d := e.Data.(type) {
		case events.MessageAccepted:
			accepted[e.ExecutionID]++
			if d.RecoveredFrom != "" && recovered[d.RecoveredFrom] {
				w.t.Fatalf("execution %s was recovered twice", d.RecoveredFrom)
			}
			recovered[d.RecoveredFrom] = true
		case events.BlockStart:
			open[d.Block.ID] = true
		case events.BlockComplete:
			delete(open, d.Block.ID)
		}
		if events.IsTerminal(e.Type()) {
			ends[e.ExecutionID]++
		}
	}
	for id, n := range accepted {
		if n != 1 || ends[id] != 1 {
			w.t.Fatalf("execution %s: accepted %d times, ended %d times", id, n, ends[id])
		}
	}
	if len(ends) != len(accepted) {
		w.t.Fatalf("%d executions ended, %d were accepted", len(ends), len(accepted))
	}
	if len(open) > 0 {
		w.t.Fatalf("blocks that stayed open: %v", open)
	}
	last := w.life.list[len(w.life.list)-1]
	for _, e := range w.life.list {
		if e.Type() == (events.SessionDeleted{}).EventType() && e.ID != last.ID {
			w.t.Fatal("an event follows session_deleted")
		}
	}
}

// TestFold_InPiecesEqualsTheWhole tests that folding a history in pieces, with the state stored as JSON between them,
// gives the state of folding it at once.
func TestFold_InPiecesEqualsTheWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		for range rapid.IntRange(5, 60).Draw(t, "steps") {
			w.step()
		}
		var at run.State
		for _, e := range w.run.list {
			at = run.Evolve(at, e)
		}
		var pieces run.State
		for i, e := range w.run.list {
			pieces = run.Evolve(pieces, e)
			if rapid.Bool().Draw(t, fmt.Sprint("store", i)) {
				pieces = stored(t, pieces)
			}
		}
		if got, want := text(t, pieces), text(t, at); got != want {
			t.Fatalf("in pieces %s\nat once   %s", got, want)
		}
		var life, lifePieces session.State
		for i, e := range w.life.list {
			life = session.Evolve(life, e)
			lifePieces = session.Evolve(lifePieces, e)
			if rapid.Bool().Draw(t, fmt.Sprint("store life", i)) {
				lifePieces = stored(t, lifePieces)
			}
		}
		if got, want := text(t, lifePieces), text(t, life); got != want {
			t.Fatalf("in pieces %s\nat once   %s", got, want)
		}
	})
}

func stored[S any](t *rapid.T, s S) S {
	var out S
	if err := json.Unmarshal([]byte(text(t, s)), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func text(t *rapid.T, v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
