package gateway_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// fork creates a session that continues another one.
func (w *world) fork(tenant string, f events.SessionForked) string {
	w.t.Helper()
	id := newID(w.t, events.KindSession)
	w.emit(tenant, id, events.Event{Data: events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local"}}, events.Event{Data: f})
	return id
}

// TestFiles_ForkHasTheInheritedSnapshot tests that until a fork has a snapshot, its files are those of the
// snapshot that it began with, which may belong to an earlier ancestor or a deleted one.
func TestFiles_ForkHasTheInheritedSnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	parent := w.session("default")
	one := w.snapshot("default", parent, snapshotTime, [2]string{"a", "old\n"})               // event 2
	w.snapshot("default", parent, snapshotTime, [2]string{"a", "new\n"}, [2]string{"b", "x"}) // event 3
	child := w.fork("default", events.SessionForked{Parent: parent, Asked: 2, Effective: 2, Snapshot: one, SnapshotSeq: 2})
	grandchild := w.fork("default", events.SessionForked{Parent: child, Asked: 2, Effective: 2, Snapshot: one, SnapshotSession: parent})
	last := w.fork("default", events.SessionForked{Parent: grandchild, Asked: 2, Effective: 2, Snapshot: one, SnapshotSession: parent})
	wants := func(what string) {
		t.Helper()
		for _, id := range []string{child, grandchild, last} {
			at := "/api/sessions/" + id
			for _, when := range []string{"", "?at=1", "?at=2"} {
				if a := g.get(at+"/files/a"+when).want(t, 200); string(a.body) != "old\n" {
					t.Errorf("%s: file a%s is %s", what, when, a)
				}
				if a := g.get(at+"/files"+when).want(t, 200); a.text("snapshot") != one || a.text("at") != "2026-03-04T05:06:07Z" || a.text("files", "0", "path") != "a" || a.field("files", "1") != nil {
					t.Errorf("%s: the files%s are %s", what, when, a)
				}
				g.get(at+"/files/b"+when).wantProblem(t, 404, "FILE_NOT_FOUND", "path")
			}
			files := g.get(at+"/state?at=2").want(t, 200)
			if want := fmt.Sprintf("The files are those that the session began with as a fork, of the snapshot of event 2 of session %s; 0 events of files lie between the session's beginning and event 2.", parent); files.text("files", "summary") != want ||
				files.text("files", "snapshotSession") != parent || files.number("files", "snapshotSeq") != 2 || files.text("files", "snapshot") != one || files.field("files", "available") != true ||
				files.number("files", "snapshotFiles") != 1 || files.text("files", "snapshotAt") != "2026-03-04T05:06:07Z" {
				t.Errorf("%s: the state is %s, want %q", what, files, want)
			}
		}
	}
	wants("while the ancestors are there")
	w.emit("default", parent, events.Event{Data: events.SessionDeleted{}})
	w.emit("default", child, events.Event{Data: events.SessionDeleted{}})
	g.get("/api/sessions/"+child+"/files/a").wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	child = last
	wants("once they are deleted")

	// File changes before the fork's own snapshot, and then the snapshot.
	w.emit("default", last, events.Event{ExecutionID: "exe_1", Data: events.FileModified{Path: "a", Size: 4}}) // event 3
	w.snapshot("default", last, snapshotTime, [2]string{"a", "mine\n"})                                        // event 4
	at := "/api/sessions/" + last
	for when, want := range map[string]string{"?at=3": "old\n", "?at=4": "mine\n", "": "mine\n"} {
		if a := g.get(at+"/files/a"+when).want(t, 200); string(a.body) != want {
			t.Errorf("file a%s is %s, want %q", when, a, want)
		}
	}
	state := g.get(at+"/state?at=3").want(t, 200)
	if state.number("files", "changeCount") != 1 || state.text("files", "changes", "0", "path") != "a" {
		t.Errorf("the state is %s", state)
	}
	if own := g.get(at+"/state?at=4").want(t, 200); own.field("files", "snapshotSession") != nil || own.number("files", "snapshotSeq") != 4 {
		t.Errorf("the state with a snapshot of its own is %s", own)
	}
	d := g.get(at+"/diff?from=2&to=4").want(t, 200)
	if d.number("files", "fileCount") != 1 || d.text("files", "files", "0", "text") != "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-old\n+mine\n" || d.number("files", "fromSnapshotSeq") != 2 ||
		d.text("files", "fromSnapshotSession") != parent || d.number("files", "toSnapshotSeq") != 4 || d.field("files", "toSnapshotSession") != nil ||
		d.text("files", "summary") != "The snapshots of event 2 of session "+parent+" and of event 4 were compared." {
		t.Errorf("the diff is %s", d)
	}
	if d = g.get(at+"/diff?from=1&to=3").want(t, 200); d.text("files", "summary") != "Both events have the same files, those of the snapshot of event 2 of session "+parent+"." {
		t.Errorf("the diff is %s", d)
	}

	// The retention removes the snapshot that the fork began with.
	must(t, w.bucket().Delete(t.Context(), "default/"+parent+"/"+one))
	if gone := g.get(at+"/files/a?at=3").wantProblem(t, 410, "SNAPSHOT_GONE", "at"); !strings.Contains(gone.text("detail"), "of event 2 of session "+parent+", which was removed, and the nearest that is left is that of event 4") {
		t.Errorf("got %s", gone)
	}
	if state = g.get(at+"/state?at=3").want(t, 200); state.field("files", "available") != false || state.number("files", "oldestSeq") != 4 {
		t.Errorf("the state is %s", state)
	}
	g.get("/api/sessions/"+grandchild+"/files").wantProblem(t, 410, "SNAPSHOT_GONE", "sessionId")
}

// TestFiles_ForkWithoutASnapshotHasNone tests that a fork that began without a snapshot has no files.
func TestFiles_ForkWithoutASnapshotHasNone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.fork("default", events.SessionForked{Parent: w.session("default"), Asked: 1, Effective: 1})
	g.get("/api/sessions/"+id+"/files").wantProblem(t, 404, "NO_SNAPSHOT", "sessionId")
	g.get("/api/sessions/"+id+"/files?at=2").wantProblem(t, 404, "NO_SNAPSHOT", "at")
}

// TestFiles_ForkCannotReadAnotherTenant tests that sessions and snapshots of another tenant cannot be read, even if
// the log names them as the origin of a fork.
func TestFiles_ForkCannotReadAnotherTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	parent := w.session("other")
	snapshot := w.snapshot("other", parent, snapshotTime, [2]string{"a", "heron\n"})
	theirs := w.fork("other", events.SessionForked{Parent: parent, Asked: 2, Effective: 2, Snapshot: snapshot, SnapshotSeq: 2})
	for _, path := range []string{"/files", "/files/a", "/files?at=2", "/files/a?at=2", "/state?at=2"} {
		g.get("/api/sessions/"+theirs+path).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	}
	for _, name := range []string{snapshot, "other/" + parent + "/" + snapshot} {
		forged := w.fork("default", events.SessionForked{Parent: parent, Asked: 2, Effective: 2, Snapshot: name, SnapshotSeq: 2})
		for _, path := range []string{"/files/a", "/files/a?at=2", "/state?at=2"} {
			if a := g.get("/api/sessions/" + forged + path); a.status < 400 || strings.Contains(string(a.body), "heron") {
				t.Errorf("%s of a fork of another tenant's session answered %s", path, a)
			}
		}
	}
}

// TestListSessions_ParentSelectsForks tests the pages of a session's forks, in order of creation, without deleted forks and
// forks of other sessions.
func TestListSessions_ParentSelectsForks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	parent, other := w.session("default"), w.session("default")
	var forks []string
	for range 5 {
		forks = append(forks, w.fork("default", events.SessionForked{Parent: parent, Asked: 1, Effective: 1}))
	}
	w.fork("default", events.SessionForked{Parent: other, Asked: 1, Effective: 1})
	w.fork("default", events.SessionForked{Parent: forks[0], Asked: 1, Effective: 1})
	w.emit("default", forks[4], events.Event{Data: events.SessionDeleted{}})
	var ids []string
	for token := ""; ; {
		a := g.get("/api/sessions?order=asc&pageSize=2&parent="+parent+"&pageToken="+token).want(t, 200)
		for i := 0; a.text("sessions", fmt.Sprint(i), "sessionId") != ""; i++ {
			ids = append(ids, a.text("sessions", fmt.Sprint(i), "sessionId"))
			if a.text("sessions", fmt.Sprint(i), "parent", "sessionId") != parent {
				t.Errorf("a fork of another session: %s", a)
			}
		}
		if token = a.text("nextPageToken"); token == "" {
			break
		}
		g.get("/api/sessions?order=asc&pageSize=2&parent="+other+"&pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
	}
	want := forks[:4]
	slices.Sort(want) // they were created at the same time
	if !slices.Equal(ids, want) {
		t.Errorf("the forks are %v, want %v", ids, want)
	}
	if a := g.get("/api/sessions?parent="+newID(t, events.KindSession)).want(t, 200); a.field("sessions", "0") != nil {
		t.Errorf("forks of a missing session: %s", a)
	}
	g.get("/api/sessions?parent=x").wantProblem(t, 400, "INVALID_REQUEST", "parent")
	list, err := spoolv1.NewSessionsClient(g.conn()).ListSessions(t.Context(), &spoolv1.ListSessionsRequest{Parent: parent})
	must(t, err)
	if len(list.GetSessions()) != 4 || list.GetSessions()[0].GetSessionId() != want[3] {
		t.Errorf("over gRPC the forks are %v", list.GetSessions())
	}
}

// TestHistoryBlocks_PagesAreComplete tests the pages of the blocks of all ancestors, each in its state at the last inherited
// event.
func TestHistoryBlocks_PagesAreComplete(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	parent := w.session("default")
	first := w.turn("default", parent, "one", "first answer")
	second := w.turn("default", parent, "two", "second answer") // the call is open at event 10
	empty := w.fork("default", events.SessionForked{Parent: parent, Asked: 10, Effective: 10})
	child := w.fork("default", events.SessionForked{Parent: empty, Asked: 2, Effective: 2})
	third := w.turn("default", child, "three", "third answer")
	last := w.fork("default", events.SessionForked{Parent: child, Asked: 8, Effective: 8})
	want := []string{"blk_" + first, "call_" + first, "text_" + first, "blk_" + second, "call_" + second, "blk_" + third, "call_" + third, "text_" + third}
	path := "/api/sessions/" + last + "/history/blocks?pageSize="
	for size := 1; size <= 9; size++ {
		var got []string
		owners := map[string]string{}
		for token, pages := "", 0; ; pages++ {
			a := g.get(fmt.Sprint(path, size, "&pageToken=", token)).want(t, 200)
			n := 0
			for i := 0; a.text("ancestors", fmt.Sprint(i), "sessionId") != ""; i++ {
				for j := 0; a.text("ancestors", fmt.Sprint(i), "blocks", fmt.Sprint(j), "id") != ""; j++ {
					id := a.text("ancestors", fmt.Sprint(i), "blocks", fmt.Sprint(j), "id")
					got, n, owners[id] = append(got, id), n+1, a.text("ancestors", fmt.Sprint(i), "sessionId")
					if status := a.text("ancestors", fmt.Sprint(i), "blocks", fmt.Sprint(j), "status"); (status == "pending") != (id == "call_"+second) {
						t.Errorf("block %s is %s", id, status)
					}
				}
			}
			if token = a.text("nextPageToken"); n > size || n < size && token != "" || pages > 10 {
				t.Fatalf("a page of %d: %s", size, a)
			}
			if token == "" {
				break
			}
		}
		if !slices.Equal(got, want) || owners["blk_"+first] != parent || owners["blk_"+third] != child {
			t.Errorf("in pages of %d: %v of %v, want %v", size, got, owners, want)
		}
	}
	g.get(path+"201").wantProblem(t, 400, "INVALID_REQUEST", "pageSize")
	g.get(path+"1&pageToken=x").wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
}
