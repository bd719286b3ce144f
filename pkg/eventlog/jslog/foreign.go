package jslog

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// position returns the position of a message on a subject.
func (l *Log) position(s events.Subject, seq uint64) eventlog.Position {
	return eventlog.Position{Shard: topology.ShardOf(s.Partition(), l.shards), Seq: seq}
}

// decodeCommit returns the commit of a message, or *eventlog.ForeignError if the message is not part of the log.
func (l *Log) decodeCommit(ctx context.Context, s events.Subject, m message) (events.Commit, error) {
	rec, err := eventlog.DecodeNATSRecord(l.partitions, m.Subject, l.position(s, m.Seq), m.Time, m.Data)
	return rec.Commit, l.checkForeign(ctx, rec, m, err)
}

// openRecord is like eventlog.OpenRecord, but returns *eventlog.ForeignError if the message is not part of the log.
func (l *Log) openRecord(ctx context.Context, p eventlog.Position, m message) (eventlog.Record, error) {
	rec, err := l.openUndecodedRecord(ctx, p, m)
	if err != nil {
		return rec, err
	}
	return l.ResolveEvents(ctx, rec)
}

// openUndecodedRecord is like openRecord, but does not decode the events.
func (l *Log) openUndecodedRecord(ctx context.Context, p eventlog.Position, m message) (eventlog.Record, error) {
	rec, err := eventlog.DecodeNATSRecord(l.partitions, m.Subject, p, m.Time, m.Data)
	return rec, l.checkForeign(ctx, rec, m, err)
}

// ResolveEvents decodes the events of a record that ReadUndecoded yielded, and fetches the data that they refer to.
// Several goroutines may call it at the same time. Its errors are those of Read for one commit.
func (l *Log) ResolveEvents(ctx context.Context, rec eventlog.Record) (eventlog.Record, error) {
	return eventlog.ResolveEvents(ctx, rec, l.payloads)
}

// checkForeign returns *eventlog.ForeignError if a message is not part of the log: no writer signed it, or the server
// copied it from another stream. decoded is the error of decoding the record; checkForeign returns it for messages that
// need no signature.
func (l *Log) checkForeign(ctx context.Context, rec eventlog.Record, m message, decoded error) error {
	p := rec.Position
	foreign := func(why string) error {
		return &eventlog.ForeignError{Position: p, Subject: m.Subject, Reason: why}
	}
	if from := m.header.Get(jetstream.StreamHeader); from != "" {
		return foreign(fmt.Sprintf("the server copied it from stream %.64q", from))
	}
	if l.keys.IsZero() || !l.signing.MustBeSigned(p.Shard, p.Seq) {
		return decoded
	}
	if decoded != nil {
		return foreign(decoded.Error())
	}
	why, err := l.keys.CheckSignature(rec.Subject, rec.Commit, m.header.Get(topology.HeaderSignature))
	var unknown *eventlog.UnknownKeyError
	switch {
	case errors.As(err, &unknown):
		return l.handleUnknownKey(ctx, unknown, foreign)
	case err != nil:
		return err
	case why != "":
		return foreign(why)
	}
	return nil
}

// handleUnknownKey returns the error for a commit whose key this process does not have. If the installation knows the
// key, a writer may have stored the commit, and the read must fail. Otherwise the commit is foreign.
func (l *Log) handleUnknownKey(ctx context.Context, unknown *eventlog.UnknownKeyError, foreign func(string) error) error {
	signing, err := topology.ReadSigning(ctx, l.js, l.shards)
	if err != nil {
		return fmt.Errorf("%w: look for key %s: %w", eventlog.ErrUnavailable, unknown.Key, err)
	}
	if slices.Contains(signing.Keys, unknown.Key) {
		return fmt.Errorf("%w: %w", eventlog.ErrUnavailable, unknown)
	}
	return foreign("it is signed with the key " + unknown.Key + ", which the installation does not know")
}

// logForeign logs a message that is not part of the log and that a read skips.
func (l *Log) logForeign(ctx context.Context, foreign *eventlog.ForeignError) {
	l.logger.ErrorContext(ctx, "skip a message that is not part of the log", "position", foreign.Position.String(), "subject", foreign.Subject, "reason", foreign.Reason)
}
