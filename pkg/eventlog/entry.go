package eventlog

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// Entries loads and appends to the entries of the catalogue: agents, instances, environments and skills.
type Entries struct{ Log Log }

// Entry is the state of a catalogue entry and the head of its chain.
type Entry struct {
	Head  Head
	State versions.State
}

// VersionError is returned for a reference to an entry or a version that does not exist.
type VersionError struct {
	Kind events.Aspect
	Ref  events.Reference
}

func (e *VersionError) Error() string {
	if e.Ref.Version == "" {
		return fmt.Sprintf("there is no %s %s", e.Kind, e.Ref)
	}
	return fmt.Sprintf("there is no %s %s, or no such version of it", e.Kind, e.Ref)
}

// Load returns an entry. An entry that does not exist has no versions.
func (s Entries) Load(ctx context.Context, subject events.Subject, f Freshness) (Entry, error) {
	var e Entry
	var err error
	if e.Head, err = s.Log.Last(ctx, subject, f); err != nil {
		return e, fmt.Errorf("load %s: %w", subject, err)
	}
	if e.Head.Seq == 0 {
		return e, nil
	}
	if stateOf(e.Head.Commit.State, versions.Number, &e.State) {
		e.State = e.State.Settle(e.Head.Seq)
		return e, nil
	}
	e.State = versions.State{}
	for rec, err := range commits(ctx, s.Log, e.Head) {
		if err != nil {
			return e, err
		}
		e.State = versions.Fold(e.State, rec.Commit.ID, rec.Events).Settle(rec.Position.Seq)
	}
	return e, nil
}

// Append appends the events of a command and updates e. The id of the commit is derived from the command.
func (s Entries) Append(ctx context.Context, e *Entry, actor events.Actor, command string, list []events.Event) error {
	id := events.Derive(events.KindCommit, command)
	next := versions.Fold(e.State, id, list)
	head, err := s.Log.Append(ctx, e.Head, events.Draft{ID: id, Actor: actor, Events: list, State: next})
	if err != nil {
		return err
	}
	e.Head, e.State = head, next.Settle(head.Seq)
	return nil
}

// HasCommand reports whether a command was carried out on the entry. It reads the entry's chain only if the state no
// longer has all commands.
func (s Entries) HasCommand(ctx context.Context, e Entry, command string) (bool, error) {
	id := events.Derive(events.KindCommit, command)
	if e.State.HasCommand(id) || !e.State.MayHaveDropped() {
		return e.State.HasCommand(id), nil
	}
	_, done, err := findCommit(ctx, s.Log, e.Head, id)
	return done, err
}

// Position returns the position of the entry's last commit.
func (s Entries) Position(e Entry) Position {
	return Position{Shard: e.Head.Subject.Partition() % s.Log.Shards(), Seq: e.Head.Seq}
}

// Resolve returns the payload that created the version to which a reference refers (AgentApplied, InstanceApplied,
// EnvironmentApplied or SkillPushed). The reference in the payload has the digest. The error is a *VersionError if
// there is no such version.
func (s Entries) Resolve(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (events.Payload, error) {
	subject := ref.Subject(kind, tenant)
	freshness := Leader
	if events.IsDigest(ref.Version) {
		freshness = Any // the version of a digest never changes
	}
	for {
		e, err := s.Load(ctx, subject, freshness)
		if err != nil {
			return nil, err
		}
		digest, ok := e.State.Resolve(ref.Version)
		if ok {
			var p events.Payload
			if p, err = s.version(ctx, e, digest); err == nil || !errors.Is(err, ErrNotFound) {
				return p, err
			}
		}
		if freshness == Leader {
			return nil, &VersionError{kind, ref}
		}
		freshness = Leader // the replica may not have the newest commits
	}
}

// Recall returns the payload that created a version, even if the version was removed since. ref must have its
// digest. The error is a *VersionError if the version never existed.
func (s Entries) Recall(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (events.Payload, error) {
	e, err := s.Load(ctx, ref.Subject(kind, tenant), Leader)
	if err != nil {
		return nil, err
	}
	p, err := s.version(ctx, e, ref.Version)
	if errors.Is(err, ErrNotFound) {
		return nil, &VersionError{kind, ref}
	}
	return p, err
}

// version returns the payload that created a version, or ErrNotFound.
func (s Entries) version(ctx context.Context, e Entry, digest string) (events.Payload, error) {
	if at := e.State.At(digest); at > 0 {
		rec, err := s.Log.At(ctx, Position{Shard: s.Position(e).Shard, Seq: at})
		if err != nil {
			return nil, err
		}
		return createdVersion(rec, digest)
	}
	for rec, err := range commits(ctx, s.Log, e.Head) {
		if err != nil {
			return nil, err
		}
		if p, err := createdVersion(rec, digest); err == nil {
			return p, nil
		}
	}
	return nil, ErrNotFound
}

// createdVersion returns the payload in rec that created the version, or ErrNotFound.
func createdVersion(rec Record, digest string) (events.Payload, error) {
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
