package eventlog

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// Catalogue loads the entries of the catalogue (agents, instances, environments and skills) from the log, and appends
// events to them.
type Catalogue struct{ Log Log }

// CatalogueEntry is the state of an agent, instance, environment or skill, and the last commit of its subject.
type CatalogueEntry struct {
	Head  Head
	State versions.State
}

// UnknownVersionError is returned for a reference to a catalogue entry, or to a version of it, that does not exist.
type UnknownVersionError struct {
	Kind events.Aspect
	Ref  events.Reference
}

func (e *UnknownVersionError) Error() string {
	if e.Ref.Version == "" {
		return fmt.Sprintf("there is no %s %s", e.Kind, e.Ref)
	}
	return fmt.Sprintf("there is no %s %s, or no such version of it", e.Kind, e.Ref)
}

// Load returns the entry of a subject. An entry that does not exist has no versions.
func (s Catalogue) Load(ctx context.Context, subject events.Subject, f Freshness) (CatalogueEntry, error) {
	var e CatalogueEntry
	var err error
	if e.Head, err = s.Log.Last(ctx, subject, f); err != nil {
		return e, fmt.Errorf("load %s: %w", subject, err)
	}
	if e.Head.Seq == 0 {
		return e, nil
	}
	if decodeState(e.Head.Commit.State, versions.StateVersion, &e.State) {
		e.State = e.State.WithCommitSeq(e.Head.Seq)
		return e, nil
	}
	e.State = versions.State{}
	for rec, err := range commitsUpTo(ctx, s.Log, e.Head) {
		if err != nil {
			return e, err
		}
		e.State = versions.Fold(e.State, rec.Commit.ID, rec.Events).WithCommitSeq(rec.Position.Seq)
	}
	return e, nil
}

// Append appends the events of a command to the log and updates e. The id of the commit is derived from the command.
func (s Catalogue) Append(ctx context.Context, e *CatalogueEntry, actor events.Actor, command string, list []events.Event) error {
	id := events.DeriveID(events.KindCommit, command)
	next := versions.Fold(e.State, id, list)
	head, err := s.Log.Append(ctx, e.Head, events.Draft{ID: id, Actor: actor, Events: list, State: next})
	if err != nil {
		return err
	}
	e.Head, e.State = head, next.WithCommitSeq(head.Seq)
	return nil
}

// HasCommand reports whether a command was carried out on the entry. It reads the entry's chain only if the state no
// longer has all commands.
func (s Catalogue) HasCommand(ctx context.Context, e CatalogueEntry, command string) (bool, error) {
	id := events.DeriveID(events.KindCommit, command)
	if e.State.HasCommand(id) || !e.State.MayHaveDropped() {
		return e.State.HasCommand(id), nil
	}
	_, done, err := findCommit(ctx, s.Log, e.Head, id)
	return done, err
}

// Position returns the position of the entry's last commit.
func (s Catalogue) Position(e CatalogueEntry) Position {
	return Position{Shard: e.Head.Subject.Partition() % s.Log.Shards(), Seq: e.Head.Seq}
}

// Resolve returns the payload that created the version to which a reference refers (AgentApplied, InstanceApplied,
// EnvironmentApplied or SkillPushed). The reference in the payload has the digest. The error is a *UnknownVersionError if
// there is no such version.
func (s Catalogue) Resolve(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (events.Payload, error) {
	subject := ref.Subject(kind, tenant)
	freshness := LeaderOnly
	if events.IsDigest(ref.Version) {
		freshness = AnyReplica // the version of a digest never changes
	}
	for {
		e, err := s.Load(ctx, subject, freshness)
		if err != nil {
			return nil, err
		}
		digest, ok := e.State.Resolve(ref.Version)
		if ok {
			var p events.Payload
			if p, err = s.findVersion(ctx, e, digest); err == nil || !errors.Is(err, ErrNotFound) {
				return p, err
			}
		}
		if freshness == LeaderOnly {
			return nil, &UnknownVersionError{kind, ref}
		}
		freshness = LeaderOnly // the replica may not have the newest commits
	}
}

// ResolveRemoved returns the payload that created a version of a catalogue entry, even if the version was removed
// since. ref must have the digest of the version. The error is a *UnknownVersionError if the version never existed.
func (s Catalogue) ResolveRemoved(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (events.Payload, error) {
	e, err := s.Load(ctx, ref.Subject(kind, tenant), LeaderOnly)
	if err != nil {
		return nil, err
	}
	p, err := s.findVersion(ctx, e, ref.Version)
	if errors.Is(err, ErrNotFound) {
		return nil, &UnknownVersionError{kind, ref}
	}
	return p, err
}

// findVersion returns the payload that created the version of an entry with a digest, or ErrNotFound.
func (s Catalogue) findVersion(ctx context.Context, e CatalogueEntry, digest string) (events.Payload, error) {
	if at := e.State.CommitSeqOf(digest); at > 0 {
		rec, err := s.Log.CommitAt(ctx, Position{Shard: s.Position(e).Shard, Seq: at})
		if err != nil {
			return nil, err
		}
		return versionCreatedBy(rec, digest)
	}
	for rec, err := range commitsUpTo(ctx, s.Log, e.Head) {
		if err != nil {
			return nil, err
		}
		if p, err := versionCreatedBy(rec, digest); err == nil {
			return p, nil
		}
	}
	return nil, ErrNotFound
}

// versionCreatedBy returns the payload in rec that created the version with a digest, or ErrNotFound.
func versionCreatedBy(rec Record, digest string) (events.Payload, error) {
	for _, e := range rec.Events {
		var ref events.Reference
		switch d := e.Data.(type) {
		case events.AgentApplied:
			ref = d.Ref
		case events.InstanceApplied:
			ref = d.Ref
		case events.EnvironmentApplied:
			ref = d.Ref
		case events.SkillPushed:
			ref = d.Ref
		}
		if ref.Version == digest {
			return e.Data, nil
		}
	}
	return nil, ErrNotFound
}
