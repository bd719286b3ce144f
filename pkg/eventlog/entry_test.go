package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// digest returns a made-up digest of a definition.
func digest(n int) string { return strings.Repeat("0", 60) + fmt.Sprintf("%04x", n) }

func apply(ctx context.Context, t *testing.T, s eventlog.Catalogue, ref events.Reference, command, version string, tags ...string) {
	t.Helper()
	e, err := s.Load(ctx, ref.Subject(events.Agent, "acme"), eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	ref.Version = version
	list, err := versions.Decide(e.State, versions.ApplyVersion{
		CommandMeta: events.CommandMeta{CommandID: command, Now: time.Unix(1, 0).UTC()}, Version: version, Tags: tags,
		Data: events.AgentApplied{Ref: ref, Tags: tags, Spec: events.AgentSpec{Name: version[60:]}},
	})
	if err != nil || len(list) == 0 {
		t.Fatalf("decided %v, %v", list, err)
	}
	if err := s.Append(ctx, &e, events.Actor{Kind: "service"}, command, list); err != nil {
		t.Fatal(err)
	}
	if !e.State.HasCommand(events.DeriveID(events.KindCommit, command)) || e.State.CommitSeqOf(version) == 0 {
		t.Fatalf("after the append: %+v", e.State)
	}
}

func TestCatalogue_FindsVersionsAndTags(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	log, err := memlog.New(memlog.Config{Shards: 4})
	if err != nil {
		t.Fatal(err)
	}
	s := eventlog.Catalogue{Log: log}
	ref := events.Reference{Slug: "reviewer"}
	resolve := func(version string) string {
		r := ref
		r.Version = version
		p, err := s.Resolve(ctx, events.Agent, "acme", r)
		var missing *eventlog.UnknownVersionError
		if errors.As(err, &missing) {
			return "none"
		}
		if err != nil {
			t.Fatal(err)
		}
		a := p.(events.AgentApplied)
		if a.Ref.Version != digest(0)[:60]+a.Spec.Name {
			t.Errorf("%s is the spec of %s", a.Ref.Version, a.Spec.Name)
		}
		return a.Spec.Name
	}
	if got := resolve(""); got != "none" {
		t.Errorf("before the first: %s", got)
	}
	apply(ctx, t, s, ref, "c1", digest(1), "stable")
	apply(ctx, t, s, ref, "c2", digest(2))
	for version, want := range map[string]string{"": "0002", "latest": "0002", "stable": "0001", digest(1): "0001", digest(3): "none", "beta": "none"} {
		if got := resolve(version); got != want {
			t.Errorf("%q is %s, want %s", version, got, want)
		}
	}
	if _, err := s.Resolve(ctx, events.Agent, "other", ref); err == nil {
		t.Error("another tenant finds the entry")
	}
	// The state holds only the newest versions. Older versions are found in the commits.
	for i := 3; i < versions.MaxVersions+10; i++ {
		apply(ctx, t, s, ref, fmt.Sprintf("c%d", i), digest(i))
	}
	for version, want := range map[string]string{digest(2): "0002", "stable": "0001", "": fmt.Sprintf("%04x", versions.MaxVersions+9), digest(0xffff): "none"} {
		if got := resolve(version); got != want {
			t.Errorf("%q is %s, want %s", version, got, want)
		}
	}
	// A fold from zero gives the same state.
	e, err := s.Load(ctx, ref.Subject(events.Agent, "acme"), eventlog.AnyReplica)
	if err != nil {
		t.Fatal(err)
	}
	st := versions.State{}
	for rec, err := range log.Read(ctx, eventlog.Position{Shard: s.Position(e).Shard}, eventlog.Filter{Subject: e.Head.Subject}) {
		if err != nil {
			t.Fatal(err)
		}
		st = versions.Fold(st, rec.Commit.ID, rec.Events).WithCommitSeq(rec.Position.Seq)
	}
	if fmt.Sprint(st) != fmt.Sprint(e.State) {
		t.Errorf("folded from zero\n%v\nwant\n%v", st, e.State)
	}
}
