package events_test

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

func TestSubject_FixedVectors(t *testing.T) {
	t.Parallel()
	id := "ses_01ARYZ6S41TSV4RRFFQ69G5FAV"
	s := events.LifeSubject("acme", id)
	// The partition is part of stored subjects: it must not change.
	const want = "ev.14.acme.ses_01ARYZ6S41TSV4RRFFQ69G5FAV.life"
	if s.String() != want {
		t.Errorf("the subject is %s, want %s", s, want)
	}
	if got := events.RunSubject("acme", id); got.ID != s.ID || got.Partition() != s.Partition() || !strings.HasSuffix(got.String(), ".run") {
		t.Errorf("the run's subject is %s", got)
	}
	if got := events.FrameSubject(events.Partitioning(0).PartitionOf(id), "xtr_1"); got != "dl.14.xtr_1" {
		t.Errorf("the subject of frames is %s", got)
	}
	if got := events.LiveSubject("acme", id); got != "live.acme."+id {
		t.Errorf("the live subject is %s", got)
	}
}

func TestParseSubject_RefusesInvalidSubjects(t *testing.T) {
	t.Parallel()
	good := events.LifeSubject("acme", events.DeriveID(events.KindSession, "a")).String()
	for _, bad := range []string{
		"", ".", "ev", good + ".x", strings.Replace(good, "ev.", "dl.", 1), strings.Replace(good, ".acme.", ".Acme.", 1),
		strings.Replace(good, ".acme.", ".*.", 1), strings.Replace(good, ".life", ".agent", 1), strings.Replace(good, ".life", "", 1),
		strings.Replace(good, ".life", ".key", 1), strings.Replace(good, "ses_", "cat_", 1), "ev.zz" + good[5:], "ev.ff" + good[5:], strings.Repeat("ev.", 5000),
	} {
		if s, err := events.ParseSubject(bad); err == nil {
			t.Errorf("%q was read as %v", bad, s)
		} else if len(err.Error()) > 600 {
			t.Errorf("the error has %d bytes", len(err.Error()))
		}
	}
}

func TestParseSubject_RoundTrips(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := events.Subject{
			Tenant: rapid.StringMatching(`[a-z0-9][a-z0-9_-]{0,63}`).Draw(t, "tenant"),
			ID:     events.DeriveID(events.KindSession, rapid.String().Draw(t, "id")),
			Aspect: rapid.SampledFrom([]events.Aspect{events.Life, events.Run, events.Key}).Draw(t, "aspect"),
		}
		if s.Aspect == events.Key {
			s.ID = events.CatalogueID(events.Key, s.Tenant, "organization", "acme", s.ID)
		}
		got, err := events.ParseSubject(s.String())
		if err != nil || got != s {
			t.Fatalf("%s reads back as %v, %v", s, got, err)
		}
		if p := s.Partition(); p < 0 || p >= events.MaxPartitions || !strings.HasPrefix(s.String(), "ev."+events.PartitionToken(p)+".") {
			t.Fatalf("%s is in partition %d", s, p)
		}
	})
}

func TestCheckTenant_NamesTheField(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"default", "a", "0", "a-b_c", strings.Repeat("a", 64)} {
		if err := events.CheckTenant("tenant", ok); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "-a", "_a", "A", "a.b", "a*", ">", "a b", "é", "a\x00", strings.Repeat("a", 65)} {
		if err := events.CheckTenant("tenant", bad); err == nil || !strings.Contains(err.Error(), "tenant") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestPartition_SpreadsIDsEvenly tests that new ids spread evenly over the partitions.
func TestPartition_SpreadsIDsEvenly(t *testing.T) {
	t.Parallel()
	const each = 1000
	var count [events.MaxPartitions]int
	for i := range each * events.MaxPartitions {
		count[events.Partition(events.DeriveID(events.KindSession, fmt.Sprint(i)))]++
	}
	for p, n := range count {
		if n < each*3/4 || n > each*5/4 {
			t.Errorf("partition %d has %d sessions of %d", p, n, each)
		}
	}
}

func FuzzParseSubject(f *testing.F) {
	f.Add(events.LifeSubject("acme", events.DeriveID(events.KindSession, "a")).String())
	f.Add("ev.00.*.>.run")
	f.Fuzz(func(t *testing.T, in string) {
		s, err := events.ParseSubject(in)
		if err == nil && s.String() != in {
			t.Errorf("%q was read as %s", in, s)
		}
	})
}
