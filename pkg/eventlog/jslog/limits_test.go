package jslog_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestMain(m *testing.M) {
	if config := os.Getenv(serverProcess); config != "" {
		if err := serve(config); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// A link of toxiproxy blocks for ever on its last write if the other end closed the connection first.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/Shopify/toxiproxy/v2/toxics.(*NoopToxic).Pipe"))
}

// stream returns a log and its only stream.
func stream(t *testing.T) (*jslog.Log, jetstream.JetStream, jetstream.Stream) {
	t.Helper()
	nc := natstest.Conn(t, natstest.Run(t))
	l := open(t, nc, 1)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	return l, js, s
}

func TestNew_RefusesIncompleteConfigs(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []jslog.Config{{}, {JetStream: js, Shards: 3}, {JetStream: js, Shards: -1}, {JetStream: js, AckTimeout: -1}} {
		if _, err := jslog.New(bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

func TestAppend_ReportsAFullStream(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l, js, st := stream(t)
	s := eventlogtest.SessionSubject(0, 1, "full")
	heads := eventlogtest.AppendCommits(t, l, s, "full", 2)
	cfg := st.CachedInfo().Config
	cfg.MaxMsgs = 2
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(ctx, heads[1], eventlogtest.Draft("more", "")); !errors.Is(err, eventlog.ErrFull) {
		t.Fatalf("append to a full log: %v, want ErrFull", err)
	}
	if rec, err := l.CommitAt(ctx, eventlog.Position{Seq: heads[0].Seq}); err != nil || rec.Commit.Hash != heads[0].Hash {
		t.Errorf("the oldest commit: %v", err)
	}
	cfg.MaxMsgs = -1
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(ctx, heads[1], eventlogtest.Draft("more", "")); err != nil {
		t.Errorf("append once there is room: %v", err)
	}
}

// TestLog_AfterAPurge tests a session whose commits the janitor removed.
func TestLog_AfterAPurge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l, _, st := stream(t)
	s, other := eventlogtest.SessionSubject(0, 1, "purged"), eventlogtest.SessionSubject(0, 1, "kept")
	kept := eventlogtest.AppendCommits(t, l, other, "kept", 1)[0]
	heads := eventlogtest.AppendCommits(t, l, s, "purged", 2)
	if err := st.Purge(ctx, jetstream.WithPurgeSubject(s.String())); err != nil {
		t.Fatal(err)
	}
	if head, err := l.Last(ctx, s, eventlog.LeaderOnly); err != nil || head.Seq != 0 {
		t.Errorf("the head is %d, %v", head.Seq, err)
	}
	for what, f := range map[string]eventlog.Filter{"all": {}, "partitions": {Partitions: []int{s.Partition(), other.Partition()}}} {
		var got []uint64
		for rec, err := range l.Read(ctx, eventlog.Position{}, f) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, rec.Position.Seq)
		}
		if len(got) != 1 || got[0] != kept.Seq {
			t.Errorf("%s reads %v, want %d only", what, got, kept.Seq)
		}
	}
	// A writer with an old head is refused. The retry of the first commit is refused too, although its guard of 0
	// holds again.
	var conflict *eventlog.ConflictError
	if _, err := l.Append(ctx, heads[1], eventlogtest.Draft("late", "")); !errors.As(err, &conflict) {
		t.Errorf("append to a purged head: %v, want a conflict", err)
	}
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, eventlogtest.Draft("purged0", "purged 0")); !errors.As(err, &conflict) {
		t.Errorf("append of a purged commit: %v, want a conflict", err)
	}
}

func TestRead_ReportsMessagesThatAreNotCommits(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l, js, _ := stream(t)
	s := eventlogtest.SessionSubject(0, 1, "foreign")
	if _, err := js.Publish(ctx, s.String(), []byte("not a commit")); err != nil {
		t.Fatal(err)
	}
	next := eventlogtest.AppendCommits(t, l, eventlogtest.SessionSubject(0, 1, "next"), "next", 1)[0]
	var at eventlog.Position
	var got error
	for rec, err := range l.Read(ctx, eventlog.Position{}, eventlog.Filter{}) {
		at, got = rec.Position, err
	}
	if got == nil || at.Seq != 1 || !strings.Contains(got.Error(), "0-1") {
		t.Fatalf("read: %v at %s, want an error that names 0-1", got, at)
	}
	for rec, err := range l.Read(ctx, at, eventlog.Filter{}) {
		if err != nil || rec.Position.Seq != next.Seq {
			t.Errorf("after it: %s, %v", rec.Position, err)
		}
	}
	if _, err := l.Last(ctx, s, eventlog.AnyReplica); err == nil {
		t.Error("the head of a subject with a foreign message was read")
	}
}

func TestAppend_StoresLargeDataAsObjects(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l, js, _ := stream(t)
	s := eventlogtest.SessionSubject(0, 1, "payload")
	text := strings.Repeat("x", 300_000)
	d := eventlogtest.Draft("payload", text)
	head, err := l.Append(ctx, eventlog.Head{Subject: s}, d)
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := js.ObjectStore(ctx, topology.BucketPayloads)
	if err != nil {
		t.Fatal(err)
	}
	objects := func() uint64 {
		t.Helper()
		st, err := js.Stream(ctx, "OBJ_"+topology.BucketPayloads)
		if err != nil {
			t.Fatal(err)
		}
		return st.CachedInfo().State.LastSeq
	}
	before := objects()
	again := eventlogtest.Draft("again", "")
	again.Events = d.Events
	if head, err = l.Append(ctx, head, again); err != nil {
		t.Fatal(err)
	}
	if after := objects(); after != before {
		t.Errorf("the same data was stored twice: %d messages, then %d", before, after)
	}

	data, err := events.DecodeCommit(mustEncode(t, head.Commit))
	if err != nil {
		t.Fatal(err)
	}
	list, err := data.DecodeEvents()
	if err != nil {
		t.Fatal(err)
	}
	raw := list[0].Data.(events.OpaquePayload).Raw
	infos, err := bucket.List(ctx)
	if err != nil || len(infos) != 1 {
		t.Fatalf("the bucket has %v, %v", infos, err)
	}
	name := infos[0].Name
	digest, mine := strings.CutPrefix(name, s.Tenant+"/"+s.ID+"/")
	if !mine || !strings.Contains(string(raw), digest) {
		t.Fatalf("the bucket has %v; the reference is %s", infos, raw)
	}
	stored, err := bucket.GetBytes(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(stored); hex.EncodeToString(sum[:]) != digest {
		t.Errorf("the object %s has another digest", digest)
	}

	// An earlier release named the object by the digest alone.
	if _, err := bucket.PutBytes(ctx, digest, stored); err != nil {
		t.Fatal(err)
	}
	if err := bucket.Delete(ctx, name); err != nil {
		t.Fatal(err)
	}
	if rec, err := l.CommitAt(ctx, eventlog.Position{Seq: head.Seq}); err != nil || len(rec.Events) == 0 {
		t.Errorf("a payload under its digest alone is read as %v, %v", rec, err)
	}
	if _, err := bucket.PutBytes(ctx, name, []byte(`{"blockId":"forged"}`)); err != nil {
		t.Fatal(err)
	}
	var forged *eventlog.PayloadError
	if _, err := l.CommitAt(ctx, eventlog.Position{Seq: head.Seq}); !errors.As(err, &forged) || forged.Digest != digest {
		t.Errorf("forged data: %v, want a PayloadError", err)
	}
	for _, n := range []string{name, digest} {
		if err := bucket.Delete(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.CommitAt(ctx, eventlog.Position{Seq: head.Seq}); !errors.Is(err, eventlog.ErrNotFound) {
		t.Errorf("missing data: %v, want ErrNotFound", err)
	}
}

func mustEncode(t *testing.T, c events.Commit) []byte {
	t.Helper()
	b, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestLog_WithoutStreams tests that, on a server without streams, calls return an error within the time of their
// context.
func TestLog_WithoutStreams(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	l := openConfig(t, jslog.Config{JetStream: js})
	ctx, cancel := context.WithTimeout(t.Context(), 300e6)
	defer cancel()
	s := eventlogtest.SessionSubject(0, 1, "none")
	if _, err := l.Append(ctx, eventlog.Head{Subject: s}, eventlogtest.Draft("x", "x")); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("append: %v, want ErrUnavailable", err)
	}
	for _, err := range l.Tail(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		if !errors.Is(err, eventlog.ErrUnavailable) {
			t.Errorf("tail: %v, want ErrUnavailable", err)
		}
	}
}
