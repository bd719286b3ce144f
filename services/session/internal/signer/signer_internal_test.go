package signer

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestSignChanges_ListsTheSameHeadsEitherWay signs several times while sessions are written. A copy that finds changes
// by counting must sign the heads that a copy without an earlier count finds, and the log must equal the signed heads.
func TestSignChanges_ListsTheSameHeadsEitherWay(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	must(t, err)
	must(t, topology.Provision(ctx, js, topology.ProvisionConfig{}))
	key, err := heads.ParsePrivateKey(strings.Repeat("5a", 32))
	must(t, err)
	now := time.Unix(1_750_000_000, 0)
	newSigner := func() *Signer {
		log, err := jslog.New(jslog.Config{JetStream: js})
		must(t, err)
		return New(Config{
			Key: key, Log: log, JetStream: js, Now: func() time.Time { return now }, Logger: slog.New(slog.DiscardHandler),
			Every: time.Minute, Signed: func(int) {}, Failed: func() {},
		})
	}
	s := newSigner()
	last := map[int]eventlog.Head{}
	random := rand.New(rand.NewPCG(1, 2))
	for pass := range 12 {
		now = now.Add(time.Minute)
		for i := range 10 + random.IntN(10) {
			n := random.IntN(3 + pass)
			head, ok := last[n]
			if !ok {
				head = eventlog.Head{Subject: eventlogtest.SessionSubject(0, 1, fmt.Sprint("signer ", n))}
			}
			last[n], err = s.cfg.Log.Append(ctx, head, eventlogtest.Draft(fmt.Sprint("signer ", pass, " ", i), "text"))
			must(t, err)
		}
		before, err := s.readChainEnd(ctx, 0)
		must(t, err)
		// A copy that has just started finds the same.
		other := newSigner()
		changes, err := other.cfg.Log.Changed(ctx, eventlog.Position{Seq: before.entry.Through}, heads.MaxHeads)
		must(t, err)
		want, err := other.readChangedHeads(ctx, 0, before.entry.Through, changes)
		must(t, err)
		if pass == 7 {
			s = newSigner() // the service restarts
		}
		must(t, s.signChangedHeads(ctx, 0))
		after, err := s.readChainEnd(ctx, 0)
		must(t, err)
		if after.entry.N != before.entry.N+1 || after.entry.Through != changes.Through.Seq || !slices.Equal(after.entry.Heads, want) {
			t.Fatalf("pass %d signed %+v, want %v up to %d", pass, after.entry, want, changes.Through.Seq)
		}
	}
	chains, err := jslog.ReadHeads(ctx, js, 1, key.Public())
	must(t, err)
	report, err := eventlog.Verify(ctx, s.cfg.Log, eventlog.VerifyScope{Heads: chains})
	must(t, err)
	if through, _ := chains[0].ProvedThrough(); report.Problem != nil || through != s.last[0].entry.Through {
		t.Errorf("proved up to %d, the log has the fault %v", through, report.Problem)
	}
}
