package natsstore_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// bucket creates only the bucket of package topology. Creating the other streams would take longer.
func bucket(t *testing.T, js jetstream.JetStream) {
	t.Helper()
	for _, o := range topology.ObjectBuckets() {
		if o.Config.Bucket == topology.BucketWorkspaces {
			if _, err := js.CreateObjectStore(t.Context(), o.Config); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// store opens the bucket as a user of package topology.
func store(t *testing.T, user string) *natsstore.Store {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Accounts: true})
	as := func(user string) jetstream.JetStream {
		nc, err := srv.ConnectAs(user)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		return js
	}
	bucket(t, as(topology.UserAdmin))
	s, err := natsstore.Open(t.Context(), as(user), topology.BucketWorkspaces)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestStore_PassesTheSuite runs the suite with the rights of each service that uses the store.
func TestStore_PassesTheSuite(t *testing.T) {
	t.Parallel()
	for _, user := range []string{topology.UserExecutor, topology.UserGateway} {
		t.Run(user, func(t *testing.T) {
			t.Parallel()
			s := store(t, user)
			workspacetest.Exercise(t, func(*testing.T) workspace.Store { return s })
		})
	}
}

// TestStore_LargeObjects tests that an object that is larger than the server's buffer arrives complete.
func TestStore_LargeObjects(t *testing.T) {
	t.Parallel()
	const size = 160 << 20
	s := store(t, topology.UserGateway)
	want, got := sha256.New(), sha256.New()
	content := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{}), size), want)
	if err := s.Put(t.Context(), "acme/ses_1/f-large", content); err != nil {
		t.Fatal(err)
	}
	r, err := s.Get(t.Context(), "acme/ses_1/f-large")
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(got, r)
	if err = errors.Join(err, r.Close()); err != nil || n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Errorf("read %d bytes: %v", n, err)
	}
}

// TestPut_FailsWithoutServer tests that Put returns an error when the server stops, and leaves no object.
func TestPut_FailsWithoutServer(t *testing.T) {
	t.Parallel()
	srv := natstest.Run(t)
	nc := natstest.Conn(t, srv)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	bucket(t, js)
	s, err := natsstore.Open(t.Context(), js, topology.BucketWorkspaces)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sent := 0
	err = s.Put(ctx, "acme/ses_1/p-1", reader(func(p []byte) (int, error) {
		if sent += len(p); sent > 4<<20 {
			nc.Close()
		}
		return len(p), nil
	}))
	if err == nil {
		t.Error("an endless object was stored")
	}
	if _, err := s.Has(ctx, "acme/ses_1/p-1"); err == nil {
		t.Error("a call on a closed connection succeeded")
	}
}

type reader func(p []byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

func TestOpen_MissingBucketIsAnError(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := natsstore.Open(t.Context(), js, topology.BucketWorkspaces); err == nil || !strings.Contains(err.Error(), "object bucket workspaces is not installed") {
		t.Errorf("open: %v", err)
	}
}

// TestGet_EndsWithItsContext tests that a read that waits for the server returns at once when its context ends.
func TestGet_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	s := restartable(t, srv)
	if err := s.Put(t.Context(), "acme/ses_1/p-1", strings.NewReader(strings.Repeat("x", 2<<20))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, err := s.Get(ctx, "acme/ses_1/p-1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() //nolint:errcheck // Close never fails
	if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	srv.Stop()
	read := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, r)
		read <- err
	}()
	select {
	case err := <-read:
		t.Fatalf("without a server the reading ended with %v", err)
	case <-time.After(500 * time.Millisecond): // the read waits by now
	}
	cancel()
	select {
	case err := <-read:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the read ended with %v", err)
		}
	case <-time.After(10 * time.Second): // the store itself would wait for 30 s
		t.Error("the read did not end with its context")
	}
}

// TestGet_ContinuesAfterARestart tests that a read continues when the server is restarted in the middle of an object.
func TestGet_ContinuesAfterARestart(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	s := restartable(t, srv)
	want := strings.Repeat("0123456789abcdef", 256<<10)
	if err := s.Put(t.Context(), "acme/ses_1/p-1", strings.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	r, err := s.Get(t.Context(), "acme/ses_1/p-1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() //nolint:errcheck // Close never fails
	begin := make([]byte, 100)
	if _, err := io.ReadFull(r, begin); err != nil {
		t.Fatal(err)
	}
	srv.Stop()
	srv.Start()
	rest, err := io.ReadAll(r)
	if err != nil || string(begin)+string(rest) != want {
		t.Errorf("got %d bytes, %v", len(begin)+len(rest), err)
	}
}

// TestGet_ObjectWithoutChunksIsCorrupt tests that an object whose content is missing is reported as corrupt, without
// a wait.
func TestGet_ObjectWithoutChunksIsCorrupt(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	s := restartable(t, srv)
	if err := s.Put(t.Context(), "acme/ses_1/p-1", strings.NewReader("content")); err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(srv.Conn())
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "OBJ_"+topology.BucketWorkspaces)
	if err == nil {
		err = stream.Purge(t.Context(), jetstream.WithPurgeSubject("$O."+topology.BucketWorkspaces+".C.>"))
	}
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Get(t.Context(), "acme/ses_1/p-1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() //nolint:errcheck // Close never fails
	var corrupt *workspace.CorruptError
	if _, err := io.ReadAll(r); !errors.As(err, &corrupt) || corrupt.Object != "acme/ses_1/p-1" {
		t.Errorf("got %v", err)
	}
}

// restartable opens the store on a server that a test can stop and start.
func restartable(t *testing.T, srv *natstest.RestartableServer) *natsstore.Store {
	t.Helper()
	js, err := jetstream.New(srv.Conn())
	if err != nil {
		t.Fatal(err)
	}
	bucket(t, js)
	s, err := natsstore.Open(t.Context(), js, topology.BucketWorkspaces)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
