package fold_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestFold_VersionsAgreeWithTheirEntry tests that the rows of versions agree with the state of their entry.
func TestFold_VersionsAgreeWithTheirEntry(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		m := newMemory(t)
		model := fold.New(3, 1000)
		for _, rec := range records(rt) {
			m.fold(model, fold.CommitBatch{Records: []eventlog.Record{rec}})
		}
		for k, e := range m.entries {
			var s versions.State
			if err := json.Unmarshal([]byte(e.State), &s); err != nil {
				rt.Fatal(err)
			}
			if e.Latest != s.Tags[events.LatestTag] || e.Removed != s.Removed {
				rt.Fatalf("%s has %+v, its state %+v", k.ID, e, s)
			}
			if strings.Contains(e.State, `\u0000`) {
				rt.Fatalf("the state %s contains NUL, which Postgres refuses", e.State)
			}
			for _, v := range s.Versions {
				row, ok := m.versions[child(k.Tenant, k.ID, v.Digest)]
				if v.Digest != "" && (!ok || row.Removed != v.Removed) {
					rt.Fatalf("%s of %s is %+v, its row %+v", v.Digest, k.ID, v, row)
				}
			}
		}
	})
}

// TestFold_VersionsBeyondTheStateKeepTheirRows tests that versions that the state has dropped keep their rows, and
// are created again when they are applied again.
func TestFold_VersionsBeyondTheStateKeepTheirRows(t *testing.T) {
	t.Parallel()
	ref := events.Reference{Slug: "a"}
	subject := ref.Subject(events.Agent, "acme")
	m := newMemory(t)
	model := fold.New(3, 1000)
	apply := func(n, at int, tags ...string) {
		r := ref
		r.Version = fmt.Sprintf("v%03d", n)
		m.fold(model, fold.CommitBatch{Records: []eventlog.Record{{Subject: subject, Position: eventlog.Position{Seq: uint64(at)},
			Events: []events.Event{{Data: events.AgentApplied{Ref: r, Tags: tags, Spec: events.AgentSpec{Name: r.Version}}}}}}})
	}
	const total = versions.MaxVersions + 20
	for n := range total {
		var tags []string
		if n == 0 {
			tags = []string{"stable"}
		}
		apply(n, n+1, tags...)
	}
	apply(1, total+1) // dropped from the state
	apply(0, total+2) // kept because of its tag
	if len(m.versions) != total {
		t.Fatalf("got %d rows, want %d", len(m.versions), total)
	}
	for n, want := range map[int]uint64{0: 1, 1: total + 1, 2: 3, total - 1: total} {
		row := m.versions[child("acme", subject.ID, fmt.Sprintf("v%03d", n))]
		if row.Position != (eventlog.Position{Seq: want}).String() || row.Removed {
			t.Errorf("version %d: %+v, want position %d", n, row, want)
		}
	}
	if e := m.entries[fold.RowKey{Tenant: "acme", ID: subject.ID}]; e.Latest != "v000" || len(e.State) > 20_000 {
		t.Errorf("the latest is %s, the state has %d bytes", e.Latest, len(e.State))
	}
}
