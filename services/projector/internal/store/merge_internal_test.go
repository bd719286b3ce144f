package store

import (
	"reflect"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestMerge_KeepsAllRows tests that merge has no forgotten field of fold.Changes. Announcements are not stored.
func TestMerge_KeepsAllRows(t *testing.T) {
	t.Parallel()
	changes := func() *fold.Changes {
		var c fold.Changes
		v := reflect.ValueOf(&c).Elem()
		one := func(f reflect.Value) { f.Set(reflect.MakeSlice(f.Type(), 1, 1)) }
		for i := range v.NumField() {
			switch f := v.Field(i); {
			case v.Type().Field(i).Name == "Announcements":
			case f.Kind() == reflect.Slice:
				one(f)
			default:
				one(f.FieldByName("New"))
				one(f.FieldByName("Changed"))
			}
		}
		return &c
	}
	all := reflect.ValueOf(mergeChanges([]GroupWrite{{Changes: changes()}, {Changes: changes()}})).Elem()
	for i := range all.NumField() {
		name := all.Type().Field(i).Name
		switch f := all.Field(i); {
		case name == "Announcements":
		case f.Kind() == reflect.Slice && f.Len() != 2, f.Kind() == reflect.Struct && (f.FieldByName("New").Len() != 2 || f.FieldByName("Changed").Len() != 2):
			t.Errorf("%s has not the rows of both writes", name)
		}
	}
}

// TestApplyMerged_Succeeds tests the merged statements alone, because ApplyTogether tries others if they fail.
func TestApplyMerged_Succeeds(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), url, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close() //nolint:errcheck // the test has ended
	list := []GroupWrite{
		{Group: 2, Next: Checkpoint{Position: 4, Shard: 0, CommitID: "cmt_4", CaughtUp: true}, Changes: &fold.Changes{}},
		{Group: 7, Next: Checkpoint{Position: 5, LagMs: 9}, Changes: &fold.Changes{Events: []*fold.Event{{Tenant: "default", Session: "ses_1", Seq: 1}}}},
	}
	if err := s.applyMerged(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	for _, w := range list {
		if have, err := s.ReadCheckpoint(t.Context(), w.Group); err != nil || have != w.Next {
			t.Errorf("group %d: checkpoint %+v, want %+v, error %v", w.Group, have, w.Next, err)
		}
	}
}
