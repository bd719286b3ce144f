package lease_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; no test passes by reaching it.
const patience = time.Minute

type bed struct {
	t  *testing.T
	js jetstream.JetStream
	// clock is the time of the EngineWatcher in nanoseconds.
	clock atomic.Int64
}

func newBed(t *testing.T, nc *nats.Conn) *bed {
	t.Helper()
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}))
	return &bed{t: t, js: js}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bed) now() time.Time { return time.Unix(0, b.clock.Load()) }

func (b *bed) bucket() jetstream.KeyValue {
	b.t.Helper()
	kv, err := b.js.KeyValue(b.t.Context(), topology.BucketLeases)
	must(b.t, err)
	return kv
}

func (b *bed) renew(l topology.Lease) {
	b.t.Helper()
	raw, err := json.Marshal(l)
	must(b.t, err)
	_, err = b.bucket().Put(b.t.Context(), l.Executor, raw)
	must(b.t, err)
}

// watch runs an EngineWatcher until the test ends.
func (b *bed) watch(js jetstream.JetStream) *lease.EngineWatcher {
	b.t.Helper()
	w := lease.NewWatcher(js, b.now, natstest.Logger(b.t))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	b.t.Cleanup(func() { cancel(); must(b.t, <-done) })
	return w
}

// renewed blocks until the EngineWatcher has seen a renewal at the present time of the clock. It renews the lease again and
// again, because a watch that begins again may miss one.
func (b *bed) renewed(w *lease.EngineWatcher, l topology.Lease) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); w.EngineGoneFor(l.Provider, l.Engine) != 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatal("the Watcher does not see a renewal")
		}
		b.renew(l)
	}
}

var one = topology.Lease{Executor: "exe_one", Provider: "docker", Engine: "e", Slots: 2}

func TestFind(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	b.renew(one)
	b.renew(topology.Lease{Executor: "exe_deleted", Engine: "e"})
	must(t, b.bucket().Delete(t.Context(), "exe_deleted"))
	b.renew(topology.Lease{Executor: "exe_purged", Engine: "e"})
	must(t, b.bucket().Purge(t.Context(), "exe_purged"))
	for name, want := range map[string]bool{"exe_one": true, "exe_deleted": false, "exe_purged": false, "exe_never": false} {
		b.renew(one) // the load of the machine must not let it expire
		l, found, err := lease.FindLease(t.Context(), b.js, name)
		if err != nil || found != want || found && l.Slots != one.Slots {
			t.Errorf("%s: got %+v, %v, %v, want found %v", name, l, found, err, want)
		}
	}
	_, err := b.bucket().Put(t.Context(), "exe_broken", []byte("{"))
	must(t, err)
	if _, found, err := lease.FindLease(t.Context(), b.js, "exe_broken"); err == nil || found {
		t.Errorf("a lease that does not decode: found %v, error %v", found, err)
	}
	must(t, b.js.DeleteKeyValue(t.Context(), topology.BucketLeases))
	if _, _, err := lease.FindLease(t.Context(), b.js, "exe_one"); err == nil {
		t.Error("without the bucket: no error, as if the executor were gone")
	}
}

func TestFind_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newBed(t, server.Conn())
	server.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := lease.FindLease(ctx, b.js, "exe_one"); err == nil {
		t.Error("without NATS: no error, as if the executor were gone")
	}
}

func TestAll_OmitsEndedLeases(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	b.renew(topology.Lease{Executor: "exe_deleted"})
	must(t, b.bucket().Delete(t.Context(), "exe_deleted"))
	b.renew(one)
	b.renew(topology.Lease{Executor: "exe_two"})
	list, err := lease.ListLeases(t.Context(), b.js)
	must(t, err)
	var names []string
	for _, l := range list {
		names = append(names, l.Executor)
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"exe_one", "exe_two"}) {
		t.Errorf("got %v", names)
	}
}

// lagging is JetStream with a replica that has no lease and answers what any replica may answer: the get requests of
// package jetstream.
type lagging struct{ jetstream.JetStream }

func (l lagging) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := l.JetStream.KeyValue(ctx, bucket)
	return laggingBucket{kv}, err
}

func (l lagging) Stream(ctx context.Context, name string) (jetstream.Stream, error) {
	s, err := l.JetStream.Stream(ctx, name)
	return laggingStream{s}, err
}

type laggingBucket struct{ jetstream.KeyValue }

func (laggingBucket) Get(context.Context, string) (jetstream.KeyValueEntry, error) {
	return nil, jetstream.ErrKeyNotFound
}

type laggingStream struct{ jetstream.Stream }

func (laggingStream) GetLastMsgForSubject(context.Context, string) (*jetstream.RawStreamMsg, error) {
	return nil, jetstream.ErrMsgNotFound
}

// An executor that a replica does not know may run an execution: it must not be taken for gone.
func TestFind_DoesNotTrustAReplicaThatLags(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	replica := lagging{b.js}
	b.renew(one)
	w := lease.NewWatcher(replica, b.now, natstest.Logger(t))
	if lives, err := w.HasLease(t.Context(), one.Executor); err != nil || !lives {
		t.Errorf("Lives: got %v, %v", lives, err)
	}
	b.renew(one)
	if list, err := lease.ListLeases(t.Context(), replica); err != nil || len(list) != 1 {
		t.Errorf("All: got %v, %v", list, err)
	}
}

func TestWatcher_CountsFromTheLastRenewal(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	w := b.watch(b.js)
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one) // Run has begun
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
	must(t, b.bucket().Delete(t.Context(), one.Executor))
	b.clock.Add(int64(time.Second))
	if got := w.EngineGoneFor("docker", "e"); got != time.Second {
		t.Errorf("an engine whose last lease was released: gone for %s", got)
	}
	for name, got := range map[string]time.Duration{
		"an engine that never had a lease":                  w.EngineGoneFor("docker", "other"),
		"an engine of that name that another provider runs": w.EngineGoneFor("modal", "e"),
	} {
		if got < time.Minute+time.Second {
			t.Errorf("%s: gone for %s", name, got)
		}
	}
}

func TestWatcher_SkipsALeaseThatDoesNotDecode(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	_, err := b.bucket().Put(t.Context(), "exe_broken", []byte("{"))
	must(t, err)
	w := b.watch(b.js)
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
}

// ending is JetStream whose first watch ends after its first entry.
type ending struct {
	jetstream.JetStream
	once  *sync.Once
	ended chan struct{}
}

type endingBucket struct {
	jetstream.KeyValue
	ending
}

func (e ending) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := e.JetStream.KeyValue(ctx, bucket)
	return endingBucket{kv, e}, err
}

func (e endingBucket) WatchAll(ctx context.Context, opts ...jetstream.WatchOpt) (jetstream.KeyWatcher, error) {
	w, err := e.KeyValue.WatchAll(ctx, opts...)
	e.once.Do(func() {
		err = errors.Join(err, w.Stop())
		close(e.ended)
	})
	return w, err
}

func TestWatcher_WatchesAgainAfterTheWatchEnds(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	js := ending{b.js, new(sync.Once), make(chan struct{})}
	w := b.watch(js)
	select {
	case <-js.ended:
	case <-time.After(patience):
		t.Fatal("the bucket is not watched")
	}
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
}

func TestWatcher_WatchesAfterNATSRestarts(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newBed(t, server.Conn())
	w := b.watch(b.js)
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
	server.Stop()
	b.clock.Add(int64(time.Minute))
	server.Start()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if kv, err := b.js.KeyValue(t.Context(), topology.BucketLeases); err == nil {
			if _, err := kv.PutString(t.Context(), "exe_other", "{}"); err == nil {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("NATS does not answer after its restart")
		}
	}
	b.renewed(w, one)
}

// An operator who installs NATS again creates the bucket again.
func TestWatcher_WatchesABucketThatWasMadeAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t, natstest.Conn(t, natstest.Run(t)))
	w := b.watch(b.js)
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
	must(t, b.js.DeleteKeyValue(t.Context(), topology.BucketLeases))
	must(t, topology.Provision(t.Context(), b.js, topology.ProvisionConfig{Shards: 1}))
	b.clock.Add(int64(time.Minute))
	b.renewed(w, one)
}
