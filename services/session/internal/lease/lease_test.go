package lease

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// renewal is an entry of the leases bucket.
type renewal struct {
	jetstream.KeyValueEntry
	value []byte
}

func (r renewal) Operation() jetstream.KeyValueOp { return jetstream.KeyValuePut }
func (r renewal) Value() []byte                   { return r.value }

// TestSettingGone tests that SPOOL_ENGINE_GONE is the time after which an engine counts as gone, since its last lease
// and since the start of the service.
func TestSettingGone(t *testing.T) {
	t.Parallel()
	for _, gone := range []time.Duration{time.Second, time.Minute} {
		now := time.Unix(1000, 0)
		w := New(Config{Now: func() time.Time { return now }, Gone: gone})
		check := func(what, engine string, want bool) {
			t.Helper()
			if got := w.EngineLives(engine); got != want {
				t.Errorf("gone %s, %s: alive is %v", gone, what, got)
			}
		}
		now = now.Add(gone - 1)
		check("just before, since the start", "e", true)
		now = now.Add(1)
		check("after it, since the start", "e", false)
		raw, err := json.Marshal(topology.Lease{Executor: "x", Engine: "e"})
		if err != nil {
			t.Fatal(err)
		}
		w.see(renewal{value: raw})
		now = now.Add(gone - 1)
		check("just before, since the lease", "e", true)
		check("another engine", "other", false)
		now = now.Add(1)
		check("after it, since the lease", "e", false)
	}
}
