package fold_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestChangedAt_IsTheLastChangeThatListsShow tests that a session has the position of the last commit that changed what lists of sessions show, also if the
// model has no row in memory, and that only such a commit is announced as a change.
func TestChangedAt_IsTheLastChangeThatListsShow(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{0, 1000} {
		m, model := newMemory(t), fold.New(3, limit)
		key := fold.RowKey{Tenant: "t", ID: "ses_1"}
		for i, c := range []struct {
			data    events.Payload
			changes bool
		}{
			{events.SessionCreated{Agent: "helper"}, true},
			{events.MessageAccepted{Content: "hello"}, true},
			{events.ExecutionDispatched{}, true},
			{events.BlockStart{Block: events.Block{ID: "b1", Kind: events.KindAssistantText, Status: events.StatusPending}}, false},
			{events.Log{Message: "x"}, false},
			{events.SessionOptionsUpdated{Metadata: []byte(`{"a":1}`)}, true},
			{events.ExecutionFailed{Code: "AGENT_EXITED"}, true},
			{events.SessionDeleted{}, true},
		} {
			seq := uint64(10 * (i + 1)) //nolint:gosec // small
			before := m.sessions[key].ChangedAt
			changes := m.fold(model, fold.CommitBatch{Records: []eventlog.Record{{
				Position: eventlog.Position{Seq: seq}, Subject: events.Subject{Tenant: "t", ID: "ses_1", Aspect: events.Life}, Events: []events.Event{{ExecutionID: "exe_1", Data: c.data}},
			}}})
			want := before
			if c.changes {
				want = int64(seq) //nolint:gosec // small
			}
			got := m.sessions[key].ChangedAt
			if d, gone := m.deleted[key]; gone {
				if got = d.ChangedAt; d.Agent != "helper" {
					t.Errorf("the deleted session has agent %q", d.Agent)
				}
			}
			if announced := changes.Announcements[0].Changed; got != want || announced != c.changes {
				t.Errorf("%T: changed at %d, want %d; announced %v", c.data, got, want, announced)
			}
		}
	}
}
