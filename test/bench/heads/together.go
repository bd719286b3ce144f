package heads

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// slicesPerRound is the number of slices into which compareTogether divides a round. The load of a shared machine
// changes within a second; therefore slices of the two compared kinds alternate, and only adjacent slices are compared.
const slicesPerRound = 12

// roundsFactor is the number of rounds of compareTogether for each round of the flag --rounds.
const roundsFactor = 5

// compareTogether compares the processor time of commits of version 2 with signed heads with that of commits of version
// 1 without signed heads, and returns the row of docs/performance.md. The result is the median of the ratios of
// adjacent slices, plus the median of the signing, which is done once in each round. Each kind has a shard of its own,
// because signing examines a whole shard. The first round is not measured, because the process has just started.
func compareTogether(ctx context.Context, b *harness.Bench, rounds, sessions, commits int) (row.Row, error) {
	kinds, err := newTestbedPair(ctx, b, sessions)
	if err != nil {
		return row.Row{}, err
	}
	rounds *= roundsFactor
	var costs [2][]float64 // microseconds a commit, by kind and slice
	var ratios, passes []float64
	for round := range rounds + 1 {
		for slice := range slicesPerRound {
			n := (slice+1)*commits/slicesPerRound - slice*commits/slicesPerRound
			if n == 0 {
				continue
			}
			var used [2]float64
			for i := range used {
				kind := (round + slice + i) % 2
				took, err := harness.CPUTime(func() error { return kinds[kind].appendToAll(ctx, n) })
				if err != nil {
					return row.Row{}, err
				}
				used[kind] = took.Seconds() * 1e6 / float64(sessions*n)
			}
			if round > 0 {
				costs[0], costs[1] = append(costs[0], used[0]), append(costs[1], used[1])
				ratios = append(ratios, used[1]/used[0])
			}
		}
		took, err := harness.CPUTime(func() error { return kinds[1].signHeads(ctx) })
		if err != nil {
			return row.Row{}, err
		}
		if round > 0 {
			passes = append(passes, took.Seconds()*1e6/float64(sessions*commits))
		}
	}
	pass, without := harness.Median(passes), harness.Median(costs[0])
	ratio := harness.Median(ratios) + pass/without
	low, high := harness.MedianBounds(ratios)
	return row.Row{
		What:     fmt.Sprintf("append of commits of version 2 with signed heads, processor time for each commit, %d sessions with %d commits between two passes", sessions, commits),
		Target:   "5 % over version 1 without signed heads",
		Measured: fmt.Sprintf("%.1f µs", harness.Median(costs[1])+pass),
		Against:  fmt.Sprintf("version 1 without signed heads %.1f µs", without),
		Ratio:    ratio,
		OK:       ratio <= 1+maxSigningShare,
		Note: fmt.Sprintf("commits: median of the ratios of %d adjacent slices, 95 %% interval %.3f to %.3f; signing: median of %d passes, %.3f of version 1; commits are signed; those of version 2 have key, user, service and address; server, writers and signer in one process",
			len(ratios), low, high, len(passes), pass/without),
	}, nil
}

// newTestbedPair returns two testbeds on one NATS server whose log has two shards. The first testbed writes commits of
// version 1 to shard 0, the second one commits of version 2 to shard 1.
func newTestbedPair(ctx context.Context, b *harness.Bench, sessions int) ([2]*testbed, error) {
	var pair [2]*testbed
	srv, err := b.StartNATSServer(natsserver.Config{Port: natsserver.RandomPort, Accounts: true})
	if err != nil {
		return pair, err
	}
	if !srv.SyncsWrites() {
		return pair, errors.New("the server does not sync every message")
	}
	js := map[string]jetstream.JetStream{}
	for _, user := range []string{topology.UserAdmin, topology.UserExecutor, topology.UserSession} {
		nc, err := srv.ConnectAs(user)
		if err != nil {
			return pair, err
		}
		b.Cleanup(func() error { nc.Close(); return nil })
		if js[user], err = jetstream.New(nc); err != nil {
			return pair, err
		}
	}
	var text strings.Builder
	for _, role := range eventlog.WriterRoles() {
		fmt.Fprintf(&text, "%s:%032d ", role, 0)
	}
	keys, err := eventlog.ParseKeys(text.String(), topology.UserExecutor)
	if err != nil {
		return pair, err
	}
	const shards = len(pair)
	if err := topology.Provision(ctx, js[topology.UserAdmin], topology.ProvisionConfig{Shards: shards, KeyIDs: keys.KeyIDs()}); err != nil {
		return pair, err
	}
	signing, err := topology.ReadSigning(ctx, js[topology.UserAdmin], shards)
	if err != nil {
		return pair, err
	}
	for shard := range pair {
		t := &testbed{js: js[topology.UserSession], shard: shard}
		pair[shard] = t
		if t.key, err = heads.ParsePrivateKey(strings.Repeat("5a", 32)); err != nil {
			return pair, err
		}
		signing.CommitVersion = shard + 1
		if t.log, err = jslog.New(jslog.Config{JetStream: js[topology.UserExecutor], Shards: shards, Keys: keys, Signing: signing}); err != nil {
			return pair, err
		}
		if t.changes, err = jslog.New(jslog.Config{JetStream: js[topology.UserSession], Shards: shards, Keys: keys, Signing: signing}); err != nil {
			return pair, err
		}
		for i := 0; len(t.writers) < sessions; i++ {
			s := events.RunSubject("default", events.DeriveID(events.KindSession, "bench", fmt.Sprint(i)))
			if topology.ShardOf(s.Partition(), shards) == shard {
				t.writers = append(t.writers, &sessionWriter{head: eventlog.Head{Subject: s}, actor: clientActor()})
			}
		}
	}
	return pair, nil
}

// clientActor returns an actor that has every field of commits of version 2, as in a commit that a client causes.
// Commits of version 1 leave out the fields that they do not support.
func clientActor() events.Actor {
	key := events.DeriveID(events.KindKey, "bench")
	return events.Actor{Kind: "key", ID: key, Key: key, User: "somebody@example.com", Service: "session/host-1:4711", Address: "192.0.2.17"}
}
