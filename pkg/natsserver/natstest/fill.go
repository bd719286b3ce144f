package natstest

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
)

// RunWithMinStore starts a server with a disk limit of natsserver.MinStoreSize bytes.
func RunWithMinStore(t testing.TB) *natsserver.Server {
	t.Helper()
	return RunConfig(t, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort, MaxStore: natsserver.MinStoreSize})
}

// FillStore writes objects that belong to no session into the bucket of workspaces until a percentage of the store is
// used. The returned function removes the objects.
func FillStore(t testing.TB, nc *nats.Conn, percent int64) (empty func()) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	const subject = "$O." + topology.BucketWorkspaces + ".C.fill"
	chunk := make([]byte, 1<<20)
	for {
		info, err := js.AccountInfo(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if int64(info.Store) >= info.Limits.MaxStore/100*percent { //nolint:gosec // bytes of a disk
			break
		}
		if _, err := js.Publish(t.Context(), subject, chunk); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		s, err := js.Stream(context.WithoutCancel(t.Context()), "OBJ_"+topology.BucketWorkspaces)
		if err == nil {
			err = s.Purge(context.WithoutCancel(t.Context()), jetstream.WithPurgeSubject(subject))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
