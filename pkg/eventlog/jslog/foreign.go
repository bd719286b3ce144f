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

// position of a message on a subject.
func (l *Log) position(s events.Subject, seq uint64) eventlog.Position {
	return eventlog.Position{Shard: topology.ShardOf(s.Partition(), l.shards), Seq: seq}
}

// decode reads the commit of a message that is part of the log; else it fails with *eventlog.ForeignError.
func (l *Log) decode(ctx context.Context, s events.Subject, m message) (events.Commit, error) {
	rec, err := eventlog.Decode(m.Subject, l.position(s, m.Seq), m.Time, m.Data)
	return rec.Commit, l.check(ctx, rec, m, err)
}

// open is eventlog.Open for a message that is part of the log; else it fails with *eventlog.ForeignError.
func (l *Log) open(ctx context.Context, p eventlog.Position, m message) (eventlog.Record, error) {
	rec, err := eventlog.Decode(m.Subject, p, m.Time, m.Data)
	if err := l.check(ctx, rec, m, err); err != nil {
		return rec, err
	}
	return eventlog.Resolve(ctx, rec, l.payloads)
}

// check tells whether a message is part of the log: a writer signed its commit, and the server did not put it there from elsewhere. decoded
// is the error of decoding the record, which it returns where commits are not signed.
func (l *Log) check(ctx context.Context, rec eventlog.Record, m message, decoded error) error {
	p := rec.Position
	foreign := func(why string) error {
		return &eventlog.ForeignError{Position: p, Subject: m.Subject, Reason: why}
	}
	if from := m.header.Get(jetstream.StreamHeader); from != "" {
		return foreign(fmt.Sprintf("the server copied it from stream %.64q", from))
	}
	if l.keys.IsZero() || !l.signing.Required(p.Shard, p.Seq) {
		return decoded
	}
	if decoded != nil {
		return foreign(decoded.Error())
	}
	why, err := l.keys.Check(rec.Subject, rec.Commit, m.header.Get(topology.HeaderSignature))
	var unknown *eventlog.UnknownKeyError
	switch {
	case errors.As(err, &unknown):
		return l.unknownKey(ctx, unknown, foreign)
	case err != nil:
		return err
	case why != "":
		return foreign(why)
	}
	return nil
}

// unknownKey decides on a commit whose key this process does not have. If the installation has such a key, the commit may be a writer's, and
// the reading must not go on without it.
func (l *Log) unknownKey(ctx context.Context, unknown *eventlog.UnknownKeyError, foreign func(string) error) error {
	signing, err := topology.ReadSigning(ctx, l.js, l.shards)
	if err != nil {
		return fmt.Errorf("%w: look for key %s: %w", eventlog.ErrUnavailable, unknown.Key, err)
	}
	if slices.Contains(signing.Keys, unknown.Key) {
		return fmt.Errorf("%w: %w", eventlog.ErrUnavailable, unknown)
	}
	return foreign("it is signed with the key " + unknown.Key + ", which this installation has never had")
}

// report logs a message that is not part of the log and that a reading leaves out.
func (l *Log) report(ctx context.Context, foreign *eventlog.ForeignError) {
	l.logger.ErrorContext(ctx, "a message is not part of the log and is left out", "position", foreign.Position.String(), "subject", foreign.Subject, "reason", foreign.Reason)
}
