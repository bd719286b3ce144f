package compat_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/compat"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// checkReplays replays every session over SSE and with the command line tool in a pipe. The replay has each recorded
// event once, in order, with its time, and the text of blocks as far as it is still stored.
func (o *old) checkReplays(t *testing.T) {
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		for name, play := range map[string]func() (*harness.ReplayResult, error){
			"SSE": func() (*harness.ReplayResult, error) { return harness.ReplaySSE(t.Context(), o.URL, key, s.ID) },
			"spool replay": func() (*harness.ReplayResult, error) {
				out, err := o.RunCLI(key, "replay", s.ID, "--speed", "max", "--json")
				if err != nil {
					return nil, err
				}
				return harness.ParseReplayOutput(out)
			},
		} {
			r, err := play()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if len(r.Events) < len(s.Events) {
				t.Fatalf("%s: %d events, want %d", name, len(r.Events), len(s.Events))
			}
			for i, want := range s.Events {
				same(t, name, s, i, []byte(r.Events[i]))
				var got events.WireEvent
				o.must(t, json.Unmarshal([]byte(r.Events[i]), &got))
				if got.Seq != want.Seq || !got.Time.Equal(want.Time) {
					t.Errorf("%s: event %d has the time %s, want %s", name, got.Seq, got.Time, want.Time)
				}
				if d, ok := want.Event().Data.(events.BlockComplete); ok && d.Block.Kind == events.KindAssistantText && !r.Whole[d.Block.ID] && r.Text[d.Block.ID] != d.Block.Content && name == "SSE" {
					t.Errorf("the text in flight of %s is %q, want %q, or that the block appears whole", d.Block.ID, r.Text[d.Block.ID], d.Block.Content)
				}
			}
		}
	})
}

// checkForks forks every session. A fork begins where no query ran and the agent's records are stored, or before that, with
// a reason. It may begin later, after a block with an anchor; earlier builds wrote none. The agents of forks continue their
// conversations.
func (o *old) checkForks(t *testing.T) {
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		last := uint32(len(s.Events))
		for i, e := range s.Events {
			seq := uint32(i + 1)
			if seq != 1 && seq != last && !events.IsTerminal(e.Type) && e.Type != (events.ExecutionStarted{}).EventType() {
				continue
			}
			want := forkPoint(s.Events, seq)
			if s.Name == compat.OpenTurnSession && want > 1 {
				t.Fatalf("the open session could be forked at %d", want)
			}
			f := o.fork(t, key, s.ID, seq)
			if f.Effective > want && strings.Contains(string(s.Events[f.Effective-1].Data), `"anchor":`) {
				want = f.Effective
			}
			if f.Asked != seq || f.Effective != want || (f.Reason == "") != (seq == want) {
				t.Errorf("the fork at %d begins at %d because %q, want %d", seq, f.Effective, f.Reason, want)
			}
		}
		if s.Name != compat.ConversationSession && programs[s.Name] == "" {
			return
		}
		if p := programs[s.Name]; p != "" {
			if _, err := exec.LookPath(p); err != nil {
				t.Skipf("%s is not on the PATH: run scripts/install", p)
			}
		}
		o.remembers(t, key, o.fork(t, key, s.ID, last).SessionID)
	})
	for _, s := range o.manifest.Sessions {
		if !s.Deleted {
			continue
		}
		var refused *compat.StatusError
		if err := o.CallAPI(o.manifest.Keys[s.Tenant], "POST", "/api/sessions/"+s.ID+"/fork", map[string]any{}, nil); !errors.As(err, &refused) || refused.Status != http.StatusNotFound {
			t.Errorf("fork of a deleted session: %v", err)
		}
	}
}

// forkOf describes where a fork begins.
type forkOf struct {
	SessionID        string
	Asked, Effective uint32
	Reason           string
}

func (o *old) fork(t *testing.T, key, session string, at uint32) forkOf {
	t.Helper()
	var made struct {
		SessionID string
		Parent    forkOf
	}
	o.must(t, o.CallAPI(key, "POST", "/api/sessions/"+session+"/fork", map[string]any{"at": at}, &made))
	made.Parent.SessionID = made.SessionID
	return made.Parent
}

// remembers checks that the fork's agent knows what its parent's agent was told.
func (o *old) remembers(t *testing.T, key, session string) {
	t.Helper()
	var a struct{ ExecutionID string }
	o.must(t, o.CallAPI(key, "POST", "/api/sessions/"+session+"/messages", map[string]any{"content": "What did I ask you to remember?"}, &a))
	end, err := o.AwaitEvent(key, session, 0, func(w events.WireEvent) bool {
		if w.Type == (events.Error{}).EventType() {
			t.Errorf("the fork's agent began with %s", w.Data)
		}
		return w.ExecutionID == a.ExecutionID && events.IsTerminal(w.Type)
	})
	o.must(t, err)
	if !strings.Contains(string(end.Data), "heron") {
		t.Errorf("the fork's turn ended with %s %s, without heron", end.Type, end.Data)
	}
}

// forkPoint returns the last event up to seq after which no query is running, and for which a snapshot has the
// agent's records that was taken before the next query was claimed.
func forkPoint(list []events.WireEvent, seq uint32) (point uint32) {
	open, claimed := map[string]bool{}, ""
	known, ended := false, 0 // known: a snapshot has the agent's records; ended: the index of the last end
	for i, e := range list[:seq] {
		switch e.Type {
		case (events.MessageAccepted{}).EventType():
			open[e.ExecutionID] = true
		case (events.ExecutionClaimed{}).EventType():
			claimed = e.ExecutionID
		case (events.TranscriptWritten{}).EventType():
			known = true
		}
		rests := false
		if events.IsTerminal(e.Type) {
			delete(open, e.ExecutionID)
			if e.ExecutionID == claimed {
				claimed, ended, rests = "", i, true
			}
		}
		if claimed == "" && (rests || len(open) == 0) && (!known || snapshotFollows(list[ended:])) {
			point = uint32(i + 1)
		}
	}
	return point
}

// snapshotFollows reports whether a snapshot is stored before the next query is claimed.
func snapshotFollows(list []events.WireEvent) bool {
	for _, e := range list {
		switch e.Type {
		case (events.WorkspaceSynced{}).EventType():
			return true
		case (events.ExecutionClaimed{}).EventType():
			return false
		}
	}
	return false
}
