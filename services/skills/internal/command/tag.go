package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// tagSkill carries out a command that moves a tag to an existing version of a skill.
func (h *Handler) tagSkill(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.TagSkill
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := checkReference(b.Ref); err != nil {
		return command.Answer{}, err
	}
	if !events.IsTag(b.Tag) {
		return command.Answer{}, invalidTagError("tag", b.Tag)
	}
	before, after, err := h.changeEntry(ctx, c, b.Ref, func(e eventlog.CatalogueEntry, meta events.CommandMeta) ([]events.Event, error) {
		digest, err := resolveDigest(e, b.Ref)
		if err != nil {
			return nil, err
		}
		return versions.Decide(e.State, versions.MoveTag{CommandMeta: meta, Version: digest, Tag: b.Tag, Data: func(digest string) events.Payload {
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
	return command.Answer{Ref: &ref, Same: before.Head.Seq == after.Head.Seq && !done, Position: h.entryPosition(after)}, nil
}

// removeSkill carries out a command that hides a skill, or one version of it.
func (h *Handler) removeSkill(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RemoveEntry
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := checkReference(b.Ref); err != nil {
		return command.Answer{}, err
	}
	_, after, err := h.changeEntry(ctx, c, b.Ref, func(e eventlog.CatalogueEntry, meta events.CommandMeta) ([]events.Event, error) {
		ref := b.Ref
		if ref.Version != "" {
			digest, err := resolveDigest(e, ref)
			if err != nil {
				return nil, err
			}
			ref.Version = digest
		}
		return versions.Decide(e.State, versions.RemoveEntry{CommandMeta: meta, Version: ref.Version, Data: events.SkillRemoved{Ref: ref}})
	})
	if err != nil {
		return command.Answer{}, err
	}
	return command.Answer{Ref: &b.Ref, Position: h.entryPosition(after)}, nil
}

// resolveDigest returns the digest of the skill version that a reference names, or a refusal if there is none.
func resolveDigest(e eventlog.CatalogueEntry, ref events.Reference) (string, error) {
	digest, ok := e.State.Resolve(ref.Version)
	if !ok {
		return "", skillNotFoundError(ref)
	}
	return digest, nil
}

// versionReference returns a reference to the version of a skill that has the digest.
func versionReference(ref events.Reference, digest string) events.Reference {
	ref.Version = digest
	return ref
}
