package waiting_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestBucket_StoresEntries(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	must(t, err)
	b := waiting.NewBucket(js)
	if _, err := b.Find(t.Context(), "exe_1"); !errors.Is(err, waiting.ErrNoBucket) {
		t.Errorf("without the bucket: %v", err)
	}
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}))
	if s, err := b.Find(t.Context(), "exe_1"); err != nil || s != (waiting.Stored{}) {
		t.Errorf("without an entry: %+v, %v", s, err)
	}
	e := waiting.Entry{
		Execution: "exe_1", Holder: "xtr_1", Attempt: 2, Reason: waiting.NotBefore, Since: time.Unix(1, 0).UTC(), Seen: time.Unix(2, 0).UTC(), Detail: "because",
		Until: time.Unix(3, 0).UTC(), Limit: 4, Used: 5,
	}
	must(t, b.Put(t.Context(), e, 0))
	s, err := b.Find(t.Context(), "exe_1")
	if err != nil || s.Entry != e || s.Revision == 0 || s.Written.IsZero() {
		t.Errorf("got %+v, %v", s, err)
	}
	for _, revision := range []uint64{0, s.Revision + 1} {
		if err := b.Put(t.Context(), e, revision); !errors.Is(err, waiting.ErrChanged) {
			t.Errorf("put at revision %d: %v", revision, err)
		}
	}
	e.Used = 6
	must(t, b.Put(t.Context(), e, s.Revision))
	must(t, b.Delete(t.Context(), "exe_1"))
	must(t, b.Delete(t.Context(), "exe_never"))
	if s, err := b.Find(t.Context(), "exe_1"); err != nil || s != (waiting.Stored{}) {
		t.Errorf("after the deletion: %+v, %v", s, err)
	}
	must(t, b.Put(t.Context(), e, 0))
}

func TestBucket_RefusesEntriesThatAreNotValid(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}))
	kv, err := js.KeyValue(t.Context(), topology.BucketWaits)
	must(t, err)
	b := waiting.NewBucket(js)
	for _, value := range []string{"", "{", "[]", `{"execution":"exe_1","reason":"magic"}`, `{"execution":"exe_2","reason":"slot"}`, `{"execution":"exe_1","reason":"slot","limit":-1}`} {
		_, err := kv.PutString(t.Context(), "exe_1", value)
		must(t, err)
		s, err := b.Find(t.Context(), "exe_1")
		if !errors.Is(err, waiting.ErrInvalid) || s.Entry != (waiting.Entry{}) || s.Revision == 0 {
			t.Errorf("%q: got %+v, %v", value, s, err)
		}
	}
}

func TestCount(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]uint32{-1: 0, 0: 0, 7: 7, math.MaxInt: math.MaxUint32} {
		if got := waiting.Count(n); got != want {
			t.Errorf("Count(%d) is %d, want %d", n, got, want)
		}
	}
}
