package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// forks forks between turns, and at each event of the second turn that ends the message, a text, a call or a result.
// Nothing of the session itself changes.
func (p *past) forks() {
	p.t.Helper()
	before, files := stored(p.t, p.c, p.session), p.workspace()
	var list []uint32
	for _, w := range p.log {
		_, whole := wholeBlock(w)
		amid := w.Seq >= p.messageOf("pear") && w.Seq < p.messageOf("plum") && (whole || w.Seq == p.messageOf("pear"))
		if amid || w.Seq == 1 || w.Seq == p.put || events.IsTerminal(w.Type) || w.Type == (events.WorkspaceSynced{}).EventType() {
			list = append(list, w.Seq)
		}
		if amid && whole {
			p.asked++
		}
	}
	for _, at := range list {
		floor, _ := p.forkableEvents(at)
		f := p.forkAt(map[string]any{"at": at}, floor)
		if _, whole := wholeBlock(p.log[at-1]); whole && f.Parent.Effective == at {
			p.exact++
		}
	}
	if p.exact != p.cuts || p.asked != 7 {
		p.t.Errorf("%d of %d forks after blocks of the second turn begin at the requested event, want %d of 7", p.exact, p.asked, p.cuts)
	}
	if missing, more := compareLines(before, stored(p.t, p.c, p.session)); len(missing)+len(more) > 0 {
		p.t.Errorf("the parent changed: gone is\n%s\nnew is\n%s", strings.Join(missing, "\n"), strings.Join(more, "\n"))
	}
	if now := p.workspace(); !maps.Equal(now, files) {
		p.t.Errorf("the parent's files changed: before %q, after %q", files, now)
	}
	p.mustComplete(question, "The fruit is plum.")
}

// compareLines returns the lines of each text that the other one does not have.
func compareLines(was, is string) (missing, more []string) {
	a, b := slices.Collect(strings.Lines(was)), slices.Collect(strings.Lines(is))
	lacks := func(list []string) func(string) bool {
		return func(line string) bool { return slices.Contains(list, line) }
	}
	return slices.DeleteFunc(slices.Clone(a), lacks(b)), slices.DeleteFunc(slices.Clone(b), lacks(a))
}

// forkWhileItRuns forks the session while its second turn waits for the model. The fork begins at the last event but
// one at which it could begin, because a snapshot certainly contains that one.
func (p *past) forkWhileItRuns() {
	p.t.Helper()
	before := stored(p.t, p.c, p.session)
	_, certain := p.forkableEvents(p.s.Cursor)
	f := p.forkAt(map[string]any{"at": p.s.Cursor}, certain)
	delete(p.begun, f.Parent.Effective) // after the turn, a fork at this event uses the records of another snapshot
	if f.Parent.Reason == "" {
		p.t.Errorf("a fork of a running turn has no reason: %+v", f.Parent)
	}
	if missing, _ := compareLines(before, stored(p.t, p.c, p.session)); len(missing) > 0 { // the session is running, so it may have more lines
		p.t.Errorf("the parent lost\n%s", strings.Join(missing, "\n"))
	}
}

// wholeBlock returns the complete block of the main conversation in an event.
func wholeBlock(w events.WireEvent) (events.Block, bool) {
	if w.ConversationID != events.MainConversation {
		return events.Block{}, false
	}
	switch d := w.Event().Data.(type) {
	case events.BlockStart:
		return d.Block, d.Block.Status != events.StatusPending
	case events.BlockComplete:
		return d.Block, true
	}
	return events.Block{}, false
}

// forkableEvents returns the last event up to seq at which the session can be forked according to its log, and the one before
// it. Such an event is between turns, or has an anchor while no tool call is open.
func (p *past) forkableEvents(seq uint32) (last, older uint32) {
	waiting, calls := map[string]bool{}, map[string]bool{}
	for _, w := range p.log[:seq] {
		anchor := ""
		switch d := w.Event().Data.(type) {
		case events.MessageAccepted:
			waiting[w.ExecutionID] = true
		case events.BlockStart:
			if d.Block.Kind == events.KindToolUse && w.ConversationID == events.MainConversation {
				calls[d.Block.ToolUseID] = true
			}
		}
		if b, ok := wholeBlock(w); ok {
			if anchor = b.Anchor; b.Kind == events.KindToolResult {
				delete(calls, b.ToolUseID)
			}
		}
		if events.IsTerminal(w.Type) {
			delete(waiting, w.ExecutionID)
			clear(calls)
		}
		if len(waiting) == 0 {
			last, older = w.Seq, w.Seq
		} else if anchor != "" && len(calls) == 0 {
			last, older = w.Seq, last
		}
	}
	return last, older
}

// forkAt forks the session. The agent of the first fork that begins at an event is asked a question: it must know
// everything up to that event and nothing after it. The fork must have the files of that event.
func (p *past) forkAt(body map[string]any, effective uint32) forked {
	p.t.Helper()
	f := fork(p.t, p.c, p.session, body)
	p.forked++
	if f.Parent.SessionID != p.session || f.Parent.Asked != body["at"] || f.Parent.Effective != effective || (f.Parent.Reason == "") != (f.Parent.Effective == f.Parent.Asked) {
		p.t.Errorf("the fork begins at %+v, want event %d", f.Parent, effective)
	}
	if p.begun[f.Parent.Effective] {
		p.c.DeleteSession(f.SessionID)
		return f // an earlier fork that begins at this event was checked
	}
	p.begun[f.Parent.Effective] = true
	child := p.talkWith(f)
	fruit := ""
	for _, w := range p.log[:f.Parent.Effective] {
		if d, ok := w.Event().Data.(events.MessageAccepted); ok {
			_, rest, _ := strings.Cut(d.Content, "the fruit is ")
			fruit, _, _ = strings.Cut(rest, ";")
		}
	}
	asked := len(p.c.Model.Requests())
	x := child.mustComplete(question, "The fruit is "+fruit+".")
	if e := of[events.Error](x); len(e) > 0 {
		p.t.Errorf("fork at %d: errors %+v", f.Parent.Asked, e)
	}
	p.knows(f, requestsAfter(p.c, asked, question))
	child.awaitSnapshot()
	p.hasFiles(f)
	p.c.DeleteSession(f.SessionID) // otherwise the process of its agent would wait for another message
	return f
}

// knows checks that the model received the conversation up to the event at which the fork begins.
func (p *past) knows(f forked, sent string) {
	p.t.Helper()
	if sent == "" {
		p.t.Errorf("fork at %d: the model received no request", f.Parent.Asked)
	}
	for said, seq := range p.said() {
		if known := strings.Contains(sent, said); known != (seq <= f.Parent.Effective) {
			p.t.Errorf("fork at %d, which begins at %d: the model received %q of event %d: %t; request: %s", f.Parent.Asked, f.Parent.Effective, said, seq, known, sent)
		}
	}
}

// said returns the texts that occur in the conversation for the first time as a message, an answer or a result, with
// the event of each.
func (p *past) said() map[string]uint32 {
	p.t.Helper()
	out := map[string]uint32{}
	for i, fruit := range []string{"apple", "pear", "plum"} {
		for _, text := range []string{"the fruit is " + fruit, "I keep " + fruit, fmt.Sprintf("%s-4%d%d", fruit, i+1, i+1), "It said of " + fruit, "Noted " + fruit} {
			at := slices.IndexFunc(p.log, func(w events.WireEvent) bool {
				if d, ok := w.Event().Data.(events.MessageAccepted); ok {
					return strings.Contains(d.Content, text)
				}
				b, ok := wholeBlock(w)
				return ok && b.Kind != events.KindUserMessage && b.Kind != events.KindToolUse && strings.Contains(b.Content+b.Output, text)
			})
			if at >= 0 {
				out[text] = uint32(at + 1)
			}
		}
	}
	return out
}

// hasFiles checks that a fork has the files of the last snapshot at which it begins, or, between turns, of the
// snapshot after the turn. The file that the client put must be there too.
func (p *past) hasFiles(f forked) {
	p.t.Helper()
	snapshot := p.snapshotAt(f.Parent.Effective)
	if end := p.log[f.Parent.Effective-1]; events.IsTerminal(end.Type) {
		for seq := range p.trees {
			if seq > end.Seq && (snapshot < end.Seq || seq < snapshot) {
				snapshot = seq
			}
		}
	}
	if f.Parent.SnapshotSeq != snapshot {
		p.t.Errorf("fork at %d: its files are those of the snapshot of %d, want %d", f.Parent.Asked, f.Parent.SnapshotSeq, snapshot)
	}
	want := tree{}
	maps.Copy(want, p.trees[snapshot])
	if f.Parent.Effective >= p.put && p.put > 0 {
		want[clientFile] = clientContent
	}
	status, raw := request(p.t, "GET", p.c.URL(0)+"/api/sessions/"+f.SessionID+"/files", map[string]string{"Accept": "application/x-tar"}, nil)
	if got := untar(p.t, raw); status != 200 || !maps.Equal(got, want) {
		p.t.Errorf("fork at %d: its files are %d %q, want %q", f.Parent.Asked, status, got, want)
	}
}
