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

// maxReason is the longest reason in bytes for a commit that could not be projected.
const maxReason = 500

// newPoison returns the record of a commit that cannot be projected completely.
func newPoison(partitions events.Partitioning, group int, rec eventlog.Record, why error) *fold.Poison {
	subject := ""
	if rec.Subject.ID != "" {
		subject = partitions.Subject(rec.Subject)
	}
	return &fold.Poison{Group: int16(group), Position: rec.Position.String(), Subject: subject, Reason: oneLine(why.Error()), At: rec.Time}
}

// reportToDead reports commits to DEAD; the commits themselves stay in the log. JetStream recognizes a repeated report by its
// message id.
func (g *group) reportToDead(ctx context.Context, list []fold.Poison) error {
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

// commitInPieces applies a refused step in pieces, so that one commit that cannot be stored does not block the others: it is
// reported to DEAD, and only its events are stored, because readers count them.
func (g *group) commitInPieces(ctx context.Context, s step) error {
	for i, rec := range s.batch.Records {
		one := step{batch: fold.Batch{Records: s.batch.Records[i : i+1]}, last: &item{rec: rec}, more: true}
		err := g.commitFresh(ctx, one)
		var refused *store.RefusedError
		if errors.As(err, &refused) {
			one.batch.Bare = true
			one.batch.Poison = []fold.Poison{*newPoison(g.p.deps.Log.Partitioning(), g.n, rec, err)}
			if err = g.reportToDead(ctx, one.batch.Poison); err == nil {
				err = g.commitFresh(ctx, one)
			}
		}
		if err != nil {
			return err
		}
	}
	s.batch = fold.Batch{Poison: s.batch.Poison}
	return g.commitFresh(ctx, s)
}

// commitFresh commits a step in a transaction of its own, with an empty model, which has no rows of the refused change.
func (g *group) commitFresh(ctx context.Context, s step) error {
	g.model = fold.New(g.n, g.p.cfg.PresentRows)
	return g.commit(ctx, s, g.db.Apply)
}

// oneLine makes s valid for a header and a row.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", " "), "?")), " ")
	s = truncate.Text(s, maxReason)
	return s
}
