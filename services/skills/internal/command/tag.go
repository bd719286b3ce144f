package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// tag carries out a command that moves a tag to an existing version of a skill.
func (h *Handler) tag(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.TagSkill
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := checkReference(b.Ref); err != nil {
		return command.Answer{}, err
	}
	if !events.IsTag(b.Tag) {
		return command.Answer{}, badTag("tag", b.Tag)
	}
	before, after, err := h.change(ctx, c, b.Ref, func(e eventlog.Entry, meta events.Meta) ([]events.Event, error) {
		digest, err := resolveDigest(e, b.Ref)
		if err != nil {
			return nil, err
		}
		return versions.Decide(e.State, versions.Tag{Meta: meta, Version: digest, Tag: b.Tag, Data: func(digest string) events.Payload {
			return events.SkillTagged{Ref: versionReference(b.Ref, digest), Tag: b.Tag}
		}})
	})
	if err != nil {
		return command.Answer{}, err
	}
	done, err := h.cfg.Entries.HasCommand(ctx, after, c.ID)
	if err != nil {
		return command.Answer{}, err
	}
	ref := versionReference(b.Ref, after.State.Tags[b.Tag])
	return command.Answer{Ref: &ref, Same: before.Head.Seq == after.Head.Seq && !done, Position: h.position(after)}, nil
}

// remove hides a skill, or one version of it.
func (h *Handler) remove(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RemoveEntry
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := checkReference(b.Ref); err != nil {
		return command.Answer{}, err
	}
	_, after, err := h.change(ctx, c, b.Ref, func(e eventlog.Entry, meta events.Meta) ([]events.Event, error) {
		ref := b.Ref
		if ref.Version != "" {
			digest, err := resolveDigest(e, ref)
			if err != nil {
				return nil, err
			}
			ref.Version = digest
		}
		return versions.Decide(e.State, versions.Remove{Meta: meta, Version: ref.Version, Data: events.SkillRemoved{Ref: ref}})
	})
	if err != nil {
		return command.Answer{}, err
	}
	return command.Answer{Ref: &b.Ref, Position: h.position(after)}, nil
}

// resolveDigest returns the digest of the version that a reference names, or the refusal if there is none.
func resolveDigest(e eventlog.Entry, ref events.Reference) (string, error) {
	digest, ok := e.State.Resolve(ref.Version)
	if !ok {
		return "", notFound(ref)
	}
	return digest, nil
}

// versionReference returns the reference to the version of a skill with a digest.
func versionReference(ref events.Reference, digest string) events.Reference {
	ref.Version = digest
	return ref
}
