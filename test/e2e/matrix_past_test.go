package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// states compares the state at every event so far, by REST and by gRPC, with the fold of the log and with the
// client's view at that event.
func (p *past) states() {
	p.t.Helper()
	for n, w := range p.log {
		for api, read := range map[string]func() (harness.SessionState, error){
			"REST": func() (harness.SessionState, error) {
				return harness.ReadState(func(path string, out any) error { p.get(path, out); return nil }, p.session, w.Seq, 7)
			},
			"gRPC": func() (harness.SessionState, error) {
				return harness.ReadStateRPC(p.t.Context(), p.rpc, p.session, w.Seq, 7)
			},
		} {
			state, err := read()
			if err == nil {
				err = harness.CompareState(state, p.log[:n+1], p.live[w.Seq])
			}
			if err != nil {
				p.t.Fatalf("%s: %v", api, err)
			}
			p.compared++
		}
	}
}

// snapshotAt returns the seq of the last snapshot at or before an event; 0 for none.
func (p *past) snapshotAt(seq uint32) (last uint32) {
	for at := range p.trees {
		if at <= seq {
			last = max(last, at)
		}
	}
	return last
}

// files checks the files at every event: they are those of the workspace at the last snapshot.
func (p *past) files() {
	p.t.Helper()
	for _, w := range p.log {
		path := fmt.Sprintf("%s/api/sessions/%s/files?at=%d", p.c.URL(0), p.session, w.Seq)
		status, raw := request(p.t, "GET", path, map[string]string{"Accept": "application/x-tar"}, nil)
		snapshot := p.snapshotAt(w.Seq)
		if snapshot == 0 {
			if status != http.StatusNotFound || !strings.Contains(string(raw), "NO_SNAPSHOT") {
				p.t.Errorf("files at %d: %d %s", w.Seq, status, raw)
			}
			continue
		}
		if status != http.StatusOK {
			p.t.Fatalf("files at %d: %d %s", w.Seq, status, raw)
		}
		if got := untar(p.t, raw); !maps.Equal(got, p.trees[snapshot]) {
			p.t.Errorf("files at %d are %q; at the snapshot of %d the workspace had %q", w.Seq, got, snapshot, p.trees[snapshot])
		}
		for name, content := range p.trees[snapshot] {
			status, raw := request(p.t, "GET", fmt.Sprintf("%s/api/sessions/%s/files/%s?at=%d", p.c.URL(0), p.session, name, w.Seq), nil, nil)
			if status != http.StatusOK || string(raw) != content {
				p.t.Errorf("file %s at %d: %d %q, want %q", name, w.Seq, status, raw, content)
			}
		}
	}
	if len(p.trees) < 5 {
		p.t.Errorf("there are snapshots %v, want one after each turn, one within, and one with the client's file", slices.Sorted(maps.Keys(p.trees)))
	}
}

// replays replays the session over SSE, over a WebSocket and with the command line tool in a pipe. Each event must be
// sent once, in order, with the bytes of the REST API. The text of a block must precede its completion, as for the
// live client.
func (p *past) replays() {
	p.t.Helper()
	last := p.log[len(p.log)-1].Seq
	var page struct{ Events []json.RawMessage }
	p.get("/api/sessions/"+p.session+"/events?limit=1000", &page)
	for transport, play := range map[string]func() (*harness.ReplayResult, error){
		"SSE": func() (*harness.ReplayResult, error) {
			return harness.ReplaySSE(p.t.Context(), p.c.URL(0), "", p.session)
		},
		"WebSocket": func() (*harness.ReplayResult, error) {
			return harness.ReplaySocket(p.t.Context(), p.c.URL(0), "", p.session)
		},
		"spool replay": func() (*harness.ReplayResult, error) {
			code, out, says := p.c.RunCLI(p.t, p.t.TempDir(), p.t.TempDir(), "replay", p.session, "--speed", "max", "--json")
			if code != 0 {
				return nil, fmt.Errorf("ended with %d: %s", code, says)
			}
			return harness.ParseReplayOutput(out)
		},
	} {
		r, err := play()
		if err != nil {
			p.t.Fatalf("%s: %v", transport, err)
		}
		if len(r.Events) < int(last) {
			p.t.Fatalf("%s: %d events, want %d", transport, len(r.Events), last)
		}
		for i, raw := range r.Events {
			var w events.WireEvent
			if err := json.Unmarshal([]byte(raw), &w); err != nil {
				p.t.Fatal(err)
			}
			if w.Seq != uint32(i+1) || i < len(page.Events) && raw != string(page.Events[i]) {
				p.t.Errorf("%s: event %d is\n%s\nREST has\n%s", transport, i+1, raw, page.Events[i])
			}
			if i < len(p.log) && (!w.Time.Equal(p.log[i].Time) || text(p.t, w) != text(p.t, p.log[i])) {
				p.t.Errorf("%s: event %d is\n%s\nthe log has\n%s", transport, i+1, raw, text(p.t, p.log[i]))
			}
		}
		p.sameText(transport, r)
	}
}

// sameText checks that the replay sent the stored text in flight of each block, or reported that the block appears
// complete.
func (p *past) sameText(transport string, r *harness.ReplayResult) {
	p.t.Helper()
	streamed := 0
	for _, b := range p.s.View.Blocks() {
		if b.Kind == events.KindToolUse {
			continue // the text in flight of this block is its input
		}
		b.Content += b.Output
		said, whole := r.Text[b.ID], r.Whole[b.ID]
		if said != "" {
			streamed++
		}
		if said != "" && !whole && said != b.Content || whole && !strings.HasPrefix(b.Content, said) {
			p.t.Errorf("%s: the text in flight of %s is %q, whole %t; its text is %q", transport, b.ID, said, whole, b.Content)
		}
	}
	if streamed == 0 {
		p.t.Errorf("%s: there was no text in flight", transport)
	}
}

// diffs compares the diffs of pairs of events with the states at both events.
func (p *past) diffs() {
	p.t.Helper()
	var ends []uint32
	for seq := range p.seqs(func(e events.WireEvent) bool { return events.IsTerminal(e.Type) }) {
		ends = append(ends, seq)
	}
	last := p.log[len(p.log)-1].Seq
	amid := 1 + uint32(slices.IndexFunc(p.log, func(w events.WireEvent) bool { // a block of the second turn is open at this event
		d, ok := w.Event().Data.(events.BlockStart)
		return ok && w.Seq > p.messageOf("pear") && d.Block.Status == events.StatusPending
	}))
	for _, pair := range [][2]uint32{{1, last}, {ends[0], ends[1]}, {ends[1], last}, {ends[0], amid}, {amid, ends[1]}, {amid, last}, {amid, amid}} {
		p.diff(pair[0], pair[1])
	}
}

func (p *past) diff(from, to uint32) {
	p.t.Helper()
	var d struct {
		BlockCount int
		Blocks     []struct {
			Change string
			Block  events.Block
		}
		Statuses []struct{ Kind, ID, From, To string }
		Reported struct{ InputTokens, OutputTokens float64 }
		Metered  struct{ Requests float64 }
		Files    struct {
			FromSnapshotSeq, ToSnapshotSeq uint32
			FileCount                      int
			Files                          []struct{ Path, Change, Text string }
		}
	}
	p.get(fmt.Sprintf("/api/sessions/%s/diff?from=%d&to=%d", p.session, from, to), &d)
	was, is := p.state(from), p.state(to)
	for _, list := range [][]events.Block{was.Blocks, is.Blocks} {
		for i := range list {
			if list[i].Status == events.StatusPending {
				list[i].Content = "" // a diff has no text in flight
			}
		}
	}
	if g, w := [...]float64{d.Reported.InputTokens, d.Reported.OutputTokens, d.Metered.Requests},
		[...]float64{is.Reported.InputTokens - was.Reported.InputTokens, is.Reported.OutputTokens - was.Reported.OutputTokens, is.Metered.Requests - was.Metered.Requests}; g != w {
		p.t.Errorf("diff of %d and %d: usage %v, want %v", from, to, g, w)
	}
	got, want := []string{}, changedBlocks(was.Blocks, is.Blocks)
	for _, b := range d.Blocks {
		got = append(got, b.Change+" "+text(p.t, b.Block))
	}
	for i, line := range want {
		change, at, _ := strings.Cut(line, " ")
		for _, b := range is.Blocks {
			if b.ID == at {
				want[i] = change + " " + text(p.t, b)
			}
		}
	}
	if !slices.Equal(got, want) || d.BlockCount != len(want) {
		p.t.Errorf("diff of %d and %d has %d blocks\n%s\nwant %d\n%s", from, to, d.BlockCount, strings.Join(got, "\n"), len(want), strings.Join(want, "\n"))
	}
	statuses := map[string]string{}
	for _, s := range d.Statuses {
		statuses[s.Kind+" "+s.ID] = s.From + ">" + s.To
	}
	if want := changedStatuses(p.session, was, is); !maps.Equal(statuses, want) {
		p.t.Errorf("diff of %d and %d has statuses %v, want %v", from, to, statuses, want)
	}
	before, after := p.snapshotAt(from), p.snapshotAt(to)
	if d.Files.FromSnapshotSeq != before || d.Files.ToSnapshotSeq != after {
		p.t.Errorf("diff of %d and %d compares the snapshots of %d and %d, want %d and %d", from, to, d.Files.FromSnapshotSeq, d.Files.ToSnapshotSeq, before, after)
	}
	files := map[string]string{}
	for _, f := range d.Files.Files {
		files[f.Path] = f.Change
		if old, now := sides(f.Text); old != p.trees[before][f.Path] || now != p.trees[after][f.Path] {
			p.t.Errorf("diff of %d and %d: %s goes from %q to %q:\n%s", from, to, f.Path, p.trees[before][f.Path], p.trees[after][f.Path], f.Text)
		}
	}
	if want := changedFiles(p.trees[before], p.trees[after]); !maps.Equal(files, want) || d.Files.FileCount != len(want) {
		p.t.Errorf("diff of %d and %d has files %v, want %v", from, to, files, want)
	}
}

// state returns the state at an event.
func (p *past) state(seq uint32) harness.SessionState {
	p.t.Helper()
	s, err := harness.ReadState(func(path string, out any) error { p.get(path, out); return nil }, p.session, seq, 200)
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

// changedBlocks returns the blocks of a later state that an earlier one does not have, or has with other content, as
// "change id".
func changedBlocks(was, is []events.Block) (list []string) {
	before := map[string]events.Block{}
	for _, b := range was {
		before[b.ID] = b
	}
	for _, b := range is {
		switch old, known := before[b.ID]; {
		case !known:
			list = append(list, "added "+b.ID)
		case reflect.DeepEqual(old, b):
		case b.Status == events.StatusPending:
			list = append(list, "changed "+b.ID)
		default:
			list = append(list, "completed "+b.ID)
		}
	}
	return list
}

// changedStatuses returns everything that has another status in a later state, as "from>to".
func changedStatuses(session string, was, is harness.SessionState) map[string]string {
	out := map[string]string{}
	add := func(what, from, to string) {
		if from != to {
			out[what] = from + ">" + to
		}
	}
	add("session "+session, was.Session.Status, is.Session.Status)
	phases := map[string]string{}
	for _, x := range was.Executions {
		phases[x.ID] = x.Phase
	}
	for _, x := range is.Executions {
		add("execution "+x.ID, phases[x.ID], x.Phase)
	}
	if b := is.Session.Sandbox; b.ID != "" {
		from := ""
		if was.Session.Sandbox.ID == b.ID {
			from = was.Session.Sandbox.State
		}
		add("sandbox "+b.ID, from, b.State)
	}
	return out
}

// changedFiles returns how each file differs between two workspaces.
func changedFiles(was, is tree) map[string]string {
	out := map[string]string{}
	for path, content := range is {
		if old, ok := was[path]; !ok {
			out[path] = "added"
		} else if old != content {
			out[path] = "changed"
		}
	}
	for path := range was {
		if _, ok := is[path]; !ok {
			out[path] = "removed"
		}
	}
	return out
}

// sides returns both texts of a unified diff of a file that is so small that the diff contains all its lines.
func sides(diff string) (old, now string) {
	_, hunk, _ := strings.Cut(diff, "\n@@ ")
	_, lines, _ := strings.Cut(hunk, "\n")
	for line := range strings.Lines(lines) {
		switch line[0] {
		case '-':
			old += line[1:]
		case '+':
			now += line[1:]
		case ' ':
			old, now = old+line[1:], now+line[1:]
		}
	}
	return old, now
}
