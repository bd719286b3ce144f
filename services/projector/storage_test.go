package projector_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
)

// awaitStoredBytes waits until the read models count the given number of stored bytes for a tenant.
func (w *world) awaitStoredBytes(tenant string, want int64) {
	w.t.Helper()
	conn, err := readmodel.Connect(w.t.Context(), w.url, readmodel.Schema)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	eventually(w.t, fmt.Sprintf("%s stores %d bytes", tenant, want), func() error {
		var have int64
		err := conn.QueryRow(w.t.Context(), "SELECT coalesce(sum(stored_bytes), 0)::bigint FROM tenant_usage WHERE tenant = $1", tenant).Scan(&have)
		if err == nil && have != want {
			err = fmt.Errorf("the tenant stores %d bytes", have)
		}
		return err
	})
}

// inLog returns the stored size of the events of a subject's id, without payloads in the object store.
func (w *world) inLog(id string) (n int64) {
	w.t.Helper()
	for rec, err := range w.log.Read(w.t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			w.t.Fatal(err)
		}
		if rec.Subject.ID == id {
			n += int64(len(rec.Commit.Events))
		}
	}
	return n
}

// TestTenantStorage_IsCounted tests that events, payloads, uploaded files, snapshots and skills of a tenant count as
// stored until the event that removes them, and that a rebuild counts the same at each step.
func TestTenantStorage_IsCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	kept, gone, other := w.session(1).create(), w.session(6).create(), w.session(2)
	other.tenant = "other"
	other.life.Subject, other.run.Subject = events.LifeSubject("other", other.id), events.RunSubject("other", other.id)
	other.create()
	all := func() int64 { return w.inLog(kept.id) + w.inLog(gone.id) }
	w.awaitStoredBytes("default", all())
	w.awaitStoredBytes("other", w.inLog(other.id))

	kept.append(&kept.life, "", events.FilePut{N: 1, Path: "a", Size: 1000})
	kept.append(&kept.run, "", events.WorkspaceSynced{Snapshot: "m-1", NewBytes: 1000, Stored: 1100})
	gone.append(&gone.run, "", events.WorkspaceSynced{Snapshot: "m-2", NewBytes: 70}) // in the form of an earlier release
	objects := int64(1000 + 1100 + 70)
	w.awaitStoredBytes("default", all()+objects)
	large := events.MessageAccepted{BlockID: "blk_1", Content: strings.Repeat("x", 300<<10)}
	text, err := json.Marshal(large)
	if err != nil {
		t.Fatal(err)
	}
	gone.append(&gone.life, "exe_1", large)
	objects += int64(len(text))
	w.awaitStoredBytes("default", all()+objects)
	kept.append(&kept.run, "", events.WorkspaceTrimmed{Objects: 2, Bytes: 1600})
	objects -= 1600
	w.awaitStoredBytes("default", all()+objects)

	gone.append(&gone.life, "", events.SessionDeleted{})
	w.awaitStoredBytes("default", all()+objects)
	w.awaitProjected(gone)
	w.sameAsRebuilt()
	var shares map[string]struct{ Stored, Events, EventBytes uint64 }
	if err := json.Unmarshal([]byte(queryOne[string](w, "SELECT spent FROM deleted_sessions WHERE id = $1", gone.id)), &shares); err != nil {
		t.Fatal(err)
	}
	if want := uint64(w.inLog(gone.id)) + 70 + uint64(len(text)); shares[""].Stored != want {
		t.Errorf("the deleted session stores %d bytes, want %d", shares[""].Stored, want)
	}
	day := testTime.Format(time.DateOnly)
	logged := events.OutputSize{Events: shares[day].Events, Bytes: shares[day].EventBytes}
	before := all() + objects
	gone.append(&gone.run, "", events.RunRetired{Usage: []events.DayUsage{{Day: day, Logged: logged}}, Stored: shares[""].Stored})
	w.awaitProjected(gone)
	w.awaitStoredBytes("default", before)
	stream, err := w.js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	for rec, err := range w.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if rec.Subject.ID == gone.id && rec.Position.Seq < gone.life.Seq {
			if err := stream.DeleteMsg(t.Context(), rec.Position.Seq); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.sameAsRebuilt()
	gone.append(&gone.run, "", events.ContentRemoved{})
	w.awaitProjected(gone)
	left := w.inLog(kept.id) + 1000 + 1100 - 1600
	w.awaitStoredBytes("default", left)
	w.sameAsRebuilt()

	// A transcript counts for its session, and not for forks, which inherit it.
	begun := w.session(4)
	begun.append(&begun.life, "", events.SessionCreated{Agent: "default", Architecture: "codex", Provider: "local", Transcript: &events.Transcript{Size: 500}})
	left += w.inLog(begun.id) + 500
	w.awaitStoredBytes("default", left)

	// The janitor of an earlier release did not record what the session stored.
	old := w.session(3).create()
	w.awaitStoredBytes("default", left+w.inLog(old.id))
	old.append(&old.life, "", events.SessionDeleted{})
	old.append(&old.run, "", events.RunRetired{})
	w.awaitProjected(old)
	w.awaitStoredBytes("default", left)
	old.append(&old.run, "", events.ContentRemoved{})
	w.awaitProjected(old)
	w.awaitStoredBytes("default", left)
	w.sameAsRebuilt()
}

// TestTenantStorage_CountsEachSkillVersion tests that each version of a skill counts until it is removed, even if others have the
// same ZIP.
func TestTenantStorage_CountsEachSkillVersion(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	pushed := func(version string, bytes uint64) events.SkillPushed {
		return events.SkillPushed{Ref: events.Reference{Slug: "s", Version: version}, Name: "s", Document: "# s", Bytes: bytes}
	}
	ref := events.Reference{Slug: "s"}
	queryOne, two := w.entry(events.Skill, "one", ref), w.entry(events.Skill, "two", ref)
	for _, s := range []*session{queryOne, two} {
		s.append(&s.life, "", pushed("1", 1000))
		w.awaitStoredBytes(s.tenant, w.inLog(s.id)+1000)
	}
	queryOne.append(&queryOne.life, "", pushed("1", 1000))
	queryOne.append(&queryOne.life, "", pushed("2", 70))
	w.awaitStoredBytes("one", w.inLog(queryOne.id)+1070)
	queryOne.append(&queryOne.life, "", events.SkillRemoved{Ref: events.Reference{Slug: "s", Version: "1"}})
	w.awaitStoredBytes("one", w.inLog(queryOne.id)+70)
	queryOne.append(&queryOne.life, "", pushed("1", 1000))
	w.awaitStoredBytes("one", w.inLog(queryOne.id)+1070)
	// A skill that is hidden as a whole keeps its ZIPs, because references by digest still find them.
	queryOne.append(&queryOne.life, "", events.SkillRemoved{Ref: ref})
	w.awaitStoredBytes("one", w.inLog(queryOne.id)+1070)
	w.awaitStoredBytes("two", w.inLog(two.id)+1000)
	w.sameAsRebuilt()
}
