package versions_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// hex returns the n-th digest.
func hex(n int) string { return fmt.Sprintf("%064x", n) }

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func meta(id int) events.CommandMeta {
	return events.CommandMeta{CommandID: fmt.Sprintf("cmd_%d", id), Now: now}
}

func apply(n int, tags ...string) versions.Command {
	return versions.ApplyVersion{CommandMeta: meta(n), Version: hex(n), Tags: tags, Data: events.AgentApplied{Ref: events.Reference{Slug: "a", Version: hex(n)}, Tags: tags}}
}

func tag(version, t string) versions.Command {
	return versions.MoveTag{CommandMeta: meta(0), Version: version, Tag: t, Data: func(v string) events.Payload {
		return events.SkillTagged{Ref: events.Reference{Slug: "a", Version: v}, Tag: t}
	}}
}

func remove(version string) versions.Command {
	return versions.RemoveEntry{CommandMeta: meta(0), Version: version, Data: events.SkillRemoved{Ref: events.Reference{Slug: "a", Version: version}}}
}

// history is a chain of commits, written as a service does.
type history struct {
	state   versions.State
	seq     uint64
	commits [][]events.Event
}

// do decides and folds a command. It commits nothing if nothing changes.
func (h *history) do(c versions.Command) error {
	list, err := versions.Decide(h.state, c)
	if err != nil || len(list) == 0 {
		return err
	}
	h.seq++
	h.commits = append(h.commits, list)
	h.state = versions.Fold(h.state, commitID(h.seq), list).WithCommitSeq(h.seq)
	return nil
}

func commitID(seq uint64) string { return fmt.Sprintf("cmt_%d", seq) }

// text returns a state in its stored form.
func text(t interface{ Fatal(...any) }, s versions.State) string {
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// short returns the number of a version's digest.
func short(digest string) string { return "v" + strings.TrimLeft(digest, "0") }

func tagsOf(s versions.State) string {
	var out []string
	for _, t := range slices.Sorted(maps.Keys(s.Tags)) {
		out = append(out, t+"="+short(s.Tags[t]))
	}
	return strings.Join(out, " ")
}

func versionsOf(s versions.State) string {
	var out []string
	for _, v := range s.Versions {
		text := fmt.Sprintf("%s@%d", short(v.Digest), v.At)
		if v.Removed {
			text += "-"
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

func TestDecide_AppendsTheExpectedEvents(t *testing.T) {
	t.Parallel()
	type commands = []versions.Command
	for name, c := range map[string]struct {
		given    commands
		when     versions.Command
		event    events.Type // "" if no event is expected
		code     string
		versions string
		tags     string
		removed  bool
	}{
		"first":                     {nil, apply(1, "v1"), "agent_applied", "", "v1@1", "latest=v1 v1=v1", false},
		"second":                    {commands{apply(1, "a")}, apply(2, "b"), "agent_applied", "", "v1@1 v2@2", "a=v1 b=v2 latest=v2", false},
		"the same":                  {commands{apply(1)}, apply(1), "", "", "v1@1", "latest=v1", false},
		"the same with its tag":     {commands{apply(1, "a", "b")}, apply(1, "b"), "", "", "v1@1", "a=v1 b=v1 latest=v1", false},
		"the same with another tag": {commands{apply(1)}, apply(1, "b"), "agent_applied", "", "v1@1", "b=v1 latest=v1", false},
		"back to the first":         {commands{apply(1), apply(2)}, apply(1), "agent_applied", "", "v1@1 v2@2", "latest=v1", false},
		"tag":                       {commands{apply(1), apply(2)}, tag(hex(1), "old"), "skill_tagged", "", "v1@1 v2@2", "latest=v2 old=v1", false},
		"tag by tag":                {commands{apply(1), apply(2)}, tag("latest", "new"), "skill_tagged", "", "v1@1 v2@2", "latest=v2 new=v2", false},
		"tag without a version":     {commands{apply(1)}, tag("", "new"), "skill_tagged", "", "v1@1", "latest=v1 new=v1", false},
		"tag latest":                {commands{apply(1), apply(2)}, tag(hex(1), "latest"), "skill_tagged", "", "v1@1 v2@2", "latest=v1", false},
		"tag that is there":         {commands{apply(1, "x")}, tag(hex(1), "x"), "", "", "v1@1", "latest=v1 x=v1", false},
		"tag of nothing":            {commands{apply(1)}, tag(hex(9), "x"), "", versions.CodeNotFound, "v1@1", "latest=v1", false},
		"tag of no tag":             {commands{apply(1)}, tag("nope", "x"), "", versions.CodeNotFound, "v1@1", "latest=v1", false},
		"tag of a removed version":  {commands{apply(1), apply(2), remove(hex(1))}, tag(hex(1), "x"), "", versions.CodeNotFound, "v1@1- v2@2", "latest=v2", false},
		"tag of a removed entry":    {commands{apply(1), remove("")}, tag(hex(1), "x"), "", versions.CodeNotFound, "v1@1", "", true},
		"remove":                    {commands{apply(1, "a")}, remove(""), "skill_removed", "", "v1@1", "", true},
		"remove twice":              {commands{apply(1), remove("")}, remove(""), "", versions.CodeNotFound, "v1@1", "", true},
		"remove nothing":            {nil, remove(""), "", versions.CodeNotFound, "", "", false},
		"remove the latest":         {commands{apply(1), apply(2, "x")}, remove(hex(2)), "skill_removed", "", "v1@1 v2@2-", "latest=v1", false},
		"remove the latest of back": {commands{apply(1), apply(2), apply(1)}, remove(hex(1)), "skill_removed", "", "v1@1- v2@2", "latest=v2", false},
		"remove an older one":       {commands{apply(1, "x"), apply(2)}, remove(hex(1)), "skill_removed", "", "v1@1- v2@2", "latest=v2", false},
		"remove one twice":          {commands{apply(1), apply(2), remove(hex(1))}, remove(hex(1)), "", versions.CodeNotFound, "v1@1- v2@2", "latest=v2", false},
		"remove one by tag":         {commands{apply(1)}, remove("latest"), "", versions.CodeNotFound, "v1@1", "latest=v1", false},
		"remove the last one":       {commands{apply(1, "x")}, remove(hex(1)), "skill_removed", "", "v1@1-", "", true},
		"apply what was removed":    {commands{apply(1), apply(2), remove(hex(1))}, apply(1), "agent_applied", "", "v2@2 v1@4", "latest=v1", false},
		"apply to a removed entry":  {commands{apply(1, "x"), remove("")}, apply(1), "agent_applied", "", "v1@1", "latest=v1", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var h history
			for _, g := range c.given {
				if err := h.do(g); err != nil {
					t.Fatal(err)
				}
			}
			before := len(h.commits)
			err := h.do(c.when)
			var refused *versions.Error
			if errors.As(err, &refused) != (c.code != "") || refused != nil && (refused.Code != c.code || refused.Field == "" || refused.Detail == "") || err != nil && c.code == "" {
				t.Errorf("error %v, want %q", err, c.code)
			}
			var event events.Type
			if len(h.commits) > before {
				event = h.commits[before][0].Type()
			}
			if event != c.event || len(h.commits) > before+1 {
				t.Errorf("decided %q, want %q", event, c.event)
			}
			if got := versionsOf(h.state); got != c.versions || tagsOf(h.state) != c.tags || h.state.Removed != c.removed {
				t.Errorf("the entry has %s, tags %s, removed %v\nwant %s, tags %s, removed %v", got, tagsOf(h.state), h.state.Removed, c.versions, c.tags, c.removed)
			}
		})
	}
}

func TestResolve_FindsTagsAndDigests(t *testing.T) {
	t.Parallel()
	var live, gone, dropped history
	for _, c := range []versions.Command{apply(1, "one"), apply(2), apply(3), remove(hex(3))} {
		if err := live.do(c); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []versions.Command{apply(1, "one"), apply(2), remove(hex(1)), remove("")} {
		if err := gone.do(c); err != nil {
			t.Fatal(err)
		}
	}
	for i := range versions.MaxVersions + 10 {
		tags := []string(nil)
		if i == 3 {
			tags = []string{"kept"}
		}
		if err := dropped.do(apply(i+1, tags...)); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		h       history
		version string
		want    string
		ok      bool
		at      uint64
	}{
		"latest":                    {live, "", hex(2), true, 2},
		"latest by name":            {live, "latest", hex(2), true, 2},
		"tag":                       {live, "one", hex(1), true, 1},
		"digest":                    {live, hex(1), hex(1), true, 1},
		"removed digest":            {live, hex(3), hex(3), false, 3},
		"no tag":                    {live, "two", "", false, 0},
		"unknown digest":            {live, hex(9), hex(9), false, 0},
		"latest of a removed":       {gone, "", "", false, 0},
		"tag of a removed":          {gone, "one", "", false, 0},
		"digest of a removed":       {gone, hex(2), hex(2), true, 2},
		"removed digest of removed": {gone, hex(1), hex(1), false, 1},
		"dropped":                   {dropped, hex(1), hex(1), true, 0},
		"kept by its tag":           {dropped, "kept", hex(4), true, 4},
		"oldest but the tagged":     {dropped, hex(12), hex(12), true, 12},
	} {
		got, ok := c.h.state.Resolve(c.version)
		if ok != c.ok || ok && got != c.want || c.want != "" && c.h.state.CommitSeqOf(c.want) != c.at {
			t.Errorf("%s: %s, %v at %d", name, got, ok, c.h.state.CommitSeqOf(c.want))
		}
	}
	// The state does not know whether a dropped version existed, so no tag is moved to it.
	if _, err := versions.Decide(dropped.state, tag(hex(1), "x")); err == nil {
		t.Error("a dropped version was tagged")
	}
	if n := len(dropped.state.Versions); n != versions.MaxVersions || !dropped.state.Dropped {
		t.Errorf("%d versions are kept, dropped %v", n, dropped.state.Dropped)
	}
}

// TestDecide_LimitsTags tests that an entry has at most MaxTags tags, including latest, in any order of commands.
func TestDecide_LimitsTags(t *testing.T) {
	t.Parallel()
	var full []string
	for i := range versions.MaxTags - 1 {
		full = append(full, fmt.Sprint("t", i))
	}
	var h history
	if err := h.do(apply(1, append(full, full...)...)); err != nil {
		t.Errorf("the maximum of tags, applied twice: %v", err)
	}
	for name, c := range map[string]versions.Command{"apply": apply(1, "more"), "apply another": apply(2, "more"), "tag": tag(hex(1), "more")} {
		var refused *versions.Error
		if _, err := versions.Decide(h.state, c); !errors.As(err, &refused) || refused.Code != versions.CodeTooManyTags || refused.Field != "tags" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := versions.Decide(versions.State{}, apply(1, append(full, "more")...)); err == nil {
		t.Error("a new entry has more than the maximum of tags")
	}
	if err := h.do(apply(2, full...)); err != nil || len(h.state.Tags) != versions.MaxTags {
		t.Errorf("existing tags: %v, then %d tags", err, len(h.state.Tags))
	}
}

// TestEvolve_AcceptsAnyEvents tests that Evolve accepts also events that no Decide would append.
func TestEvolve_AcceptsAnyEvents(t *testing.T) {
	t.Parallel()
	var s versions.State
	for i := range versions.MaxVersions + 50 {
		ref := events.Reference{Slug: "a", Version: hex(i + 1)}
		s = versions.Evolve(s, events.Event{Data: events.SkillPushed{Ref: ref, Tags: []string{fmt.Sprint("t", i)}}})
	}
	if len(s.Versions) != versions.MaxVersions+50 || s.Tags["latest"] != hex(versions.MaxVersions+50) {
		t.Errorf("%d versions, latest %s", len(s.Versions), s.Tags["latest"])
	}
	for _, data := range []events.Payload{
		nil, events.SessionIdle{}, events.OpaquePayload{}, events.SkillTagged{Ref: events.Reference{Version: "?"}, Tag: "?"}, events.AgentRemoved{Ref: events.Reference{Version: "?"}},
		events.InstanceRemoved{}, events.EnvironmentRemoved{}, events.InstanceApplied{}, events.EnvironmentApplied{},
	} {
		s = versions.Evolve(s, events.Event{Data: data})
		versions.Evolve(versions.State{}, events.Event{Data: data})
	}
	if _, err := versions.Decide(s, nil); err == nil {
		t.Error("an unknown command was accepted")
	}
}

// TestDecide_IsRepeatable tests that the ids of decided events derive from the command, so that deciding again
// returns the same events.
func TestDecide_IsRepeatable(t *testing.T) {
	t.Parallel()
	first, err := versions.Decide(versions.State{}, apply(1, "x"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := versions.Decide(versions.State{}, apply(1, "x"))
	if err != nil || len(first) != 1 || first[0].ID != second[0].ID || !first[0].Time.Equal(now) || first[0].Source != events.FromServer {
		t.Errorf("%+v\n%+v, %v", first, second, err)
	}
}
