package projector

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// maxReasonBytes is the maximum length, in bytes, of the stored reason why a commit could not be projected.
const maxReasonBytes = 500

// newPoisonCommit returns the row that records that the commit rec cannot be projected completely, and why.
func newPoisonCommit(partitions events.Partitioning, group int, rec eventlog.Record, why error) *fold.PoisonCommit {
	subject := ""
	if rec.Subject.ID != "" {
		subject = partitions.Subject(rec.Subject)
	}
	return &fold.PoisonCommit{Group: int16(group), Position: rec.Position.String(), Subject: subject, Reason: toSingleLine(why.Error()), At: rec.Time}
}

// reportPoisonToDead publishes a dead letter to the stream DEAD for each commit that cannot be projected; the commits
// themselves stay in the log. JetStream recognizes a repeated dead letter by its message id.
func (g *groupProjection) reportPoisonToDead(ctx context.Context, list []fold.PoisonCommit) error {
	if g.quiet {
		return nil
	}
	for _, p := range list {
		pos, err := eventlog.ParsePosition(p.Position)
		if err != nil {
			return err
		}
		stream, origin := topology.EventsStreamName(pos.Shard), p.Subject
		if origin == "" {
			origin = stream
		}
		msg := nats.NewMsg(topology.DeadSubject(origin))
		for key, value := range map[string]string{
			topology.HeaderDeadReason:    p.Reason,
			topology.HeaderDeadSubject:   p.Subject,
			topology.HeaderDeadStream:    stream,
			topology.HeaderDeadSequence:  strconv.FormatUint(pos.Seq, 10),
			topology.HeaderDeadDelivered: "1",
			topology.HeaderDeadHandler:   "projector",
			topology.HeaderDeadTime:      g.p.deps.Now().UTC().Format(time.RFC3339Nano),
		} {
			msg.Header.Set(key, value)
		}
		id := fmt.Sprintf("dead-%s-%d", stream, pos.Seq)
		if _, err := g.p.js.PublishMsg(ctx, msg, jetstream.WithMsgID(id)); err != nil {
			return fmt.Errorf("report commit %s to DEAD: %w", p.Position, err)
		}
		g.logger.Error("commit cannot be projected", "position", p.Position, "subject", p.Subject, "reason", p.Reason)
	}
	return nil
}

// projectSeparately folds and writes each commit of a step in a transaction of its own, so that a commit whose rows
// Postgres refuses does not block the others. For such a commit it publishes a dead letter, and writes only the rows of
// the commit's events, because readers count the events.
func (g *groupProjection) projectSeparately(ctx context.Context, s projectionStep) error {
	for i, rec := range s.batch.Records {
		one := projectionStep{batch: fold.CommitBatch{Records: s.batch.Records[i : i+1]}, last: &queuedCommit{rec: rec}, more: true}
		err := g.foldWithEmptyModel(ctx, one)
		var refused *store.RowRefusedError
		if errors.As(err, &refused) {
			one.batch.Bare = true
			one.batch.Poison = []fold.PoisonCommit{*newPoisonCommit(g.p.deps.Log.Partitioning(), g.n, rec, err)}
			if err = g.reportPoisonToDead(ctx, one.batch.Poison); err == nil {
				err = g.foldWithEmptyModel(ctx, one)
			}
		}
		if err != nil {
			return err
		}
	}
	s.batch = fold.CommitBatch{Poison: s.batch.Poison}
	return g.foldWithEmptyModel(ctx, s)
}

// foldWithEmptyModel folds the commits of a step in a new model, without rows of a change that Postgres refused, and
// writes the rows in a transaction of their own.
func (g *groupProjection) foldWithEmptyModel(ctx context.Context, s projectionStep) error {
	g.model = fold.New(g.n, g.p.cfg.PresentRows)
	return g.foldAndWrite(ctx, s, g.db.Apply)
}

// toSingleLine returns s as one line of valid UTF-8 of at most maxReasonBytes, which a NATS header and a Postgres row
// can hold.
func toSingleLine(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", " "), "?")), " ")
	s = truncate.Text(s, maxReasonBytes)
	return s
}
