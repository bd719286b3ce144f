package skills_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/skills"
)

// refuseAll pushes each bad ZIP, and checks that it is refused with its code and field, and that nothing is stored.
func refuseAll(t *testing.T, list []skilltest.InvalidZIP) {
	t.Helper()
	b := newFixture(t)
	scratch := t.TempDir()
	b.startCopy(skills.Config{Scratch: scratch})
	for _, bad := range list {
		if bad.Field == "" {
			bad.Field = "zip"
		}
		if e := b.push(bad.ZIP).Error; e == nil || e.Code != bad.Code || e.Field != bad.Field || !strings.Contains(bad.Field+": "+e.Detail, bad.Says) {
			t.Errorf("%s: %+v, want %s on %s: …%s…", bad.Name, e, bad.Code, bad.Field, bad.Says)
		}
	}
	left, err := os.ReadDir(scratch)
	if h, k := b.history(), b.storedObjects(); err != nil || len(h)+len(k)+len(left) > 0 {
		t.Errorf("%d events, kept %q, %d files, %v", len(h), k, len(left), err)
	}
}

func TestPush_RefusesUnsafeEntries(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.UnsafeEntryZIPs())
}

func TestPush_RefusesForgedArchives(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.ForgedArchives())
}

func TestPush_RefusesInvalidDocuments(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.InvalidDocumentZIPs())
}

// TestPush_OtherDigestsAndConcurrentUploads tests a ZIP whose digest differs from the stated one, and fifty
// concurrent pushes of the same ZIP.
func TestPush_OtherDigestsAndConcurrentUploads(t *testing.T) {
	t.Parallel()
	t.Run("another digest", func(t *testing.T) {
		t.Parallel()
		b := newFixture(t)
		b.startCopy(skills.Config{})
		a := b.push(version(1), func(p *command.PushSkill) { p.SHA256 = sum(version(2)) })
		if a.Error == nil || a.Error.Code != "SKILL_DIGEST_MISMATCH" || a.Error.Field != "sha256" {
			t.Errorf("%+v", a.Error)
		}
		if h, k := b.history(), b.storedObjects(); len(h)+len(k) > 0 {
			t.Errorf("%d events, kept %q", len(h), k)
		}
	})
	for _, copies := range []int{1, 2} {
		t.Run(fmt.Sprint("fifty at once, copies ", copies), func(t *testing.T) {
			t.Parallel()
			pushFiftyTimes(t, copies)
		})
	}
}

// pushFiftyTimes pushes one ZIP fifty times at once. It must become one object and one version.
func pushFiftyTimes(t *testing.T, copies int) {
	b := newFixture(t)
	for range copies {
		b.startCopy(skills.Config{Workers: 16})
	}
	z := skilltest.BuildZIP(skilltest.DocumentEntry(), skilltest.ZIPEntry{Name: "data", Content: skilltest.IncompressibleBytes(1 << 20), Raw: true})
	stream, err := b.admin.Stream(t.Context(), "OBJ_"+topology.BucketSkills)
	must(t, err)
	var all sync.WaitGroup
	made := make(chan string, 50)
	for range 50 {
		all.Go(func() {
			if a := b.push(z); a.Error != nil || *a.Ref != at(sum(z)) {
				t.Errorf("%+v", a)
			} else if !a.Same {
				made <- a.Position
			}
		})
	}
	all.Wait()
	if len(made) != 1 {
		t.Errorf("%d answers state that they created the version", len(made))
	}
	if h, k := b.history(), b.storedObjects(); len(h) != 1 || len(k) != 1 || k[0] != sum(z) {
		t.Errorf("%d events, kept %q", len(h), k)
	}
	// The object's chunks are stored once, in addition to those of the fifty uploads. If there are two copies of the
	// service, each may have begun to store them.
	info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("$O."+topology.BucketSkills+".C.>"))
	must(t, err)
	if n := len(info.State.Subjects); n < 51 || n > 50+copies {
		t.Errorf("chunks of %d objects", n)
	}
}
