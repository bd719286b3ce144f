// Package signer signs the heads of the log (docs/adr/0053). Once a minute it signs the last commit of every subject
// that changed, and soon after the end of an execution it signs those of the session. Any number of copies of the
// service may run it: the guard on the stream of heads lets one of them write each entry.
package signer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// collectTime is the time for which the signer collects sessions whose executions have ended, before it signs the
	// heads of all these sessions together.
	collectTime = time.Second
	// maxEndedSessions is the maximum number of sessions of one shard whose heads are signed soon after the end of an
	// execution. The heads of further sessions are signed in the next regular pass.
	maxEndedSessions = heads.MaxHeads / 2
	// maxConcurrentHeadReads is the maximum number of heads that the signer reads from the log at the same time.
	maxConcurrentHeadReads = 16
	// passTimeout is the time limit for the signing of one shard's heads.
	passTimeout = time.Minute
)

// Config configures a Signer. Every field is required.
type Config struct {
	Key       heads.PrivateKey
	Log       eventlog.Log
	JetStream jetstream.JetStream
	Now       func() time.Time
	Logger    *slog.Logger
	Every     time.Duration   // interval at which changed subjects are signed
	Signed    func(heads int) // is called after each entry that this copy stored
	Failed    func()          // is called for each pass that failed
}

// Signer signs the heads of the log's subjects. RequestSigning is safe for concurrent use; Run must be called once.
type Signer struct {
	cfg    Config
	stream *bus.StreamHandle
	wake   chan struct{}

	mu    sync.Mutex
	ended []map[sessionKey]bool // sessions whose execution has ended, by shard

	last []chainEnd // by shard: the last entry that this copy has seen
}

// sessionKey is the tenant and the id of a session.
type sessionKey struct{ tenant, id string }

// chainEnd is the last entry in the chain of a shard's signed heads.
type chainEnd struct {
	seq   uint64 // sequence in the stream of heads, 0 for none
	entry heads.ChainEntry
	hash  string
	at    time.Time // time of the last entry that covers all changes
}

// New returns a Signer.
func New(cfg Config) *Signer {
	s := &Signer{
		cfg: cfg, stream: bus.NewStreamHandle(cfg.JetStream, topology.StreamHeads), wake: make(chan struct{}, 1),
		ended: make([]map[sessionKey]bool, cfg.Log.Shards()), last: make([]chainEnd, cfg.Log.Shards()),
	}
	for i := range s.ended {
		s.ended[i] = map[sessionKey]bool{}
	}
	return s
}

// RequestSigning requests that the heads of a session be signed soon. It does not block.
func (s *Signer) RequestSigning(tenant, id string) {
	shard := events.Partition(id) % len(s.ended)
	s.mu.Lock()
	if len(s.ended[shard]) < maxEndedSessions {
		s.ended[shard][sessionKey{tenant, id}] = true
	}
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run signs heads until ctx ends. A pass that fails is logged, and a later pass signs the same subjects.
func (s *Signer) Run(ctx context.Context) error {
	s.forEachShard(ctx, s.signChangedHeads) // sign commits that were stored while no copy ran
	changed := time.NewTicker(s.cfg.Every)
	defer changed.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed.C:
			s.forEachShard(ctx, s.signChangedHeads)
		case <-s.wake:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(collectTime):
			}
			s.forEachShard(ctx, s.signEndedSessions)
		}
	}
}

// forEachShard calls sign for each shard of the log. It logs and counts errors of sign.
func (s *Signer) forEachShard(ctx context.Context, sign func(context.Context, int) error) {
	for shard := range s.ended {
		within, cancel := context.WithTimeout(ctx, passTimeout)
		err := sign(within, shard)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.cfg.Failed()
			s.cfg.Logger.Error("heads of the log are not signed; a later pass signs them", "shard", shard, "error", err)
		}
	}
}

// signChangedHeads signs the last commit of each subject of a shard that has changed since the last time, in as many
// entries as necessary.
func (s *Signer) signChangedHeads(ctx context.Context, shard int) error {
	again := false // this copy has just stored an entry that did not hold all changes
	for {
		t, err := s.readChainEnd(ctx, shard)
		if err != nil {
			return err
		}
		if !again && s.cfg.Now().Sub(t.at) < s.cfg.Every/2 {
			return nil // another copy was faster
		}
		changes, err := s.cfg.Log.Changed(ctx, eventlog.Position{Shard: shard, Seq: t.entry.Through}, heads.MaxHeads)
		if err != nil {
			return fmt.Errorf("find the changed subjects: %w", err)
		}
		if changes.Through.Seq <= t.entry.Through {
			return nil
		}
		list, err := s.readChangedHeads(ctx, shard, t.entry.Through, changes)
		if err != nil {
			return err
		}
		stored, err := s.storeEntry(ctx, shard, t, changes.Through.Seq, list)
		if err != nil || stored && !changes.More {
			return err
		}
		again = stored
	}
}

// readChangedHeads returns the heads of the subjects that changes lists. It reads the commits whose hash is not known
// from the log.
func (s *Signer) readChangedHeads(ctx context.Context, shard int, after uint64, changes eventlog.Changes) ([]heads.Head, error) {
	list := make([]heads.Head, 0, len(changes.Last))
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentHeadReads)
	for subject, seq := range changes.Last {
		if hash := changes.Hash[subject]; hash != "" {
			mu.Lock()
			list = append(list, heads.Head{Subject: subject, Seq: seq, Hash: hash})
			mu.Unlock()
			continue
		}
		g.Go(func() error {
			h, ok, err := s.readHead(ctx, shard, after, subject, seq)
			if err != nil || !ok {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			list = append(list, h)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	slices.SortFunc(list, func(a, b heads.Head) int { return cmp.Compare(a.Seq, b.Seq) })
	return list, nil
}

// readHead reads the commit of a subject at a stream sequence and returns it as a head. If the message there is not
// part of the log, it reads the last commit before it. ok is false if there is none, because the janitor has erased the
// commit meanwhile.
func (s *Signer) readHead(ctx context.Context, shard int, after uint64, subject string, seq uint64) (h heads.Head, ok bool, err error) {
	rec, err := s.cfg.Log.CommitAt(ctx, eventlog.Position{Shard: shard, Seq: seq})
	var foreign *eventlog.ForeignError
	switch {
	case err == nil:
		return heads.Head{Subject: subject, Seq: seq, Hash: rec.Commit.Hash}, true, nil
	case errors.Is(err, eventlog.ErrNotFound):
		return h, false, nil
	case !errors.As(err, &foreign):
		return h, false, fmt.Errorf("read the head of %s: %w", subject, err)
	}
	parsed, err := events.ParseSubject(subject)
	if err != nil {
		return h, false, nil //nolint:nilerr // no commit can be there
	}
	for rec, err := range s.cfg.Log.Read(ctx, eventlog.Position{Shard: shard, Seq: after}, eventlog.Filter{Subject: parsed}) {
		if err != nil {
			return h, false, fmt.Errorf("read the head of %s: %w", subject, err)
		}
		if rec.Position.Seq > seq {
			break
		}
		h, ok = heads.Head{Subject: subject, Seq: rec.Position.Seq, Hash: rec.Commit.Hash}, true
	}
	return h, ok, nil
}

// signEndedSessions signs the heads of the sessions of a shard for which RequestSigning was called.
func (s *Signer) signEndedSessions(ctx context.Context, shard int) error {
	s.mu.Lock()
	waiting := s.ended[shard]
	s.ended[shard] = map[sessionKey]bool{}
	s.mu.Unlock()
	if len(waiting) == 0 {
		return nil
	}
	var list []heads.Head
	for k := range waiting {
		for _, subject := range []events.Subject{events.LifeSubject(k.tenant, k.id), events.RunSubject(k.tenant, k.id)} {
			head, err := s.cfg.Log.Last(ctx, subject, eventlog.LeaderOnly)
			if err != nil {
				return fmt.Errorf("read the head of %s: %w", subject, err)
			}
			if head.Seq > 0 {
				list = append(list, heads.Head{Subject: subject.String(), Seq: head.Seq, Hash: head.Hash})
			}
		}
	}
	slices.SortFunc(list, func(a, b heads.Head) int { return cmp.Compare(a.Seq, b.Seq) })
	for {
		t, err := s.readChainEnd(ctx, shard)
		if err != nil {
			return err
		}
		fresh := slices.DeleteFunc(slices.Clone(list), func(h heads.Head) bool { return h.Seq <= t.entry.Through })
		if len(fresh) == 0 {
			return nil // a later pass over the changed subjects signs them
		}
		if stored, err := s.storeEntry(ctx, shard, t, t.entry.Through, fresh); err != nil || stored {
			return err
		}
	}
}

// readChainEnd reads the last entry in the chain of a shard's signed heads. If the chain ends before an entry that this
// copy has seen, the chain was cut, and readChainEnd returns an error, so that no new entry hides the cut.
func (s *Signer) readChainEnd(ctx context.Context, shard int) (chainEnd, error) {
	stream, err := s.stream.Open(ctx)
	if err != nil {
		return chainEnd{}, err
	}
	m, err := stream.GetLastMsgForSubject(ctx, topology.HeadSubject(shard))
	seen := s.last[shard]
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		if seen.seq > 0 {
			return chainEnd{}, chainCutError(shard, seen)
		}
		return chainEnd{}, nil
	}
	if err != nil {
		return chainEnd{}, fmt.Errorf("read the last signed heads: %w", err)
	}
	if m.Sequence == seen.seq {
		return seen, nil
	}
	e, hash, err := heads.OpenEntry(m.Data)
	if err != nil {
		s.cfg.Logger.Error("the last signed heads cannot be read; a new chain begins after them", "shard", shard, "sequence", m.Sequence, "error", err)
		return chainEnd{seq: m.Sequence}, nil
	}
	if e.N <= seen.entry.N && m.Sequence < seen.seq {
		return chainEnd{}, chainCutError(shard, seen)
	}
	t := chainEnd{seq: m.Sequence, entry: e, hash: hash, at: seen.at}
	if e.Through > seen.entry.Through {
		t.at = e.Time
	}
	s.last[shard] = t
	return t, nil
}

// chainCutError returns the error for a chain of signed heads that no longer has an entry that this copy has seen.
func chainCutError(shard int, seen chainEnd) error {
	return fmt.Errorf("%s ends before entry %d, which was there at %s: the stream %s was cut; check the log with spool verify, and restart the service to continue",
		heads.FaultSubject(shard), seen.entry.N, seen.entry.Time.UTC().Format(time.RFC3339), topology.StreamHeads)
}

// storeEntry appends an entry with signed heads to the stream HEADS. It returns false if another copy of the service
// has appended an entry first.
func (s *Signer) storeEntry(ctx context.Context, shard int, t chainEnd, through uint64, list []heads.Head) (bool, error) {
	e := heads.ChainEntry{Shard: shard, N: t.entry.N + 1, Prev: t.hash, Time: s.cfg.Now().UTC(), Through: through, Heads: list}
	data, hash, err := e.Sign(s.cfg.Key)
	if err != nil {
		return false, err
	}
	ack, err := s.cfg.JetStream.Publish(ctx, topology.HeadSubject(shard), data, jetstream.WithExpectLastSequencePerSubject(t.seq))
	var refused *jetstream.APIError
	if errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("store signed heads: %w", err)
	}
	next := chainEnd{seq: ack.Sequence, entry: e, hash: hash, at: t.at}
	if through > t.entry.Through {
		next.at = e.Time
	}
	s.last[shard] = next
	s.cfg.Signed(len(list))
	return true, nil
}
