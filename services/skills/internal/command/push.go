package command

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/workspace"
)

// pushSkill carries out a command that adds a version of a skill with the content of a ZIP. The answer has all
// information about the ZIP except the skill's document, which the client has.
func (h *Handler) pushSkill(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.PushSkill
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := checkPush(c, b); err != nil {
		return command.Answer{}, err
	}
	if answer, err := h.answerOfRepeatedPush(ctx, c, b); answer.Ref != nil || err != nil {
		return answer, err
	}
	zip, err := h.fetchUpload(ctx, b)
	if err != nil {
		return command.Answer{}, err
	}
	defer zip.close()
	found, err := skill.Check(ctx, zip.file, zip.size, skill.Limits{})
	if err != nil {
		return command.Answer{}, err
	}
	if found.Digest != b.SHA256 {
		return command.Answer{}, &skill.Error{Code: skill.CodeDigestMismatch, Field: "sha256", Detail: fmt.Sprintf("the upload's is %s, not %s", found.Digest, b.SHA256)}
	}
	ref := b.Ref
	if ref.Slug == "" {
		ref.Slug = found.Name
	}
	if ref.Slug != found.Name {
		return command.Answer{}, &skill.Error{Code: skill.CodeInvalidDocument, Field: skill.DocumentName + ": name", Detail: fmt.Sprintf("is %s, and the skill is pushed as %s: make them the same", found.Name, ref.Slug)}
	}
	ref.Version = found.Digest
	pushed := events.SkillPushed{
		Ref: ref, Tags: b.Tags, Name: found.Name, Description: found.Description, Document: found.Document,
		Bytes: found.Bytes, UnpackedBytes: found.UnpackedBytes, Files: found.Files,
	}
	// A push that the skill's state refuses stores nothing either.
	answer, err := h.appendVersion(ctx, c, true, pushed)
	if b.DryRun || err != nil {
		return answer, err
	}
	// The ZIP of an existing version is kept, also for a while after the version is removed.
	if !answer.Same {
		if err := h.storeZIP(ctx, found.Digest, zip); err != nil {
			return command.Answer{}, err
		}
	}
	return h.appendVersion(ctx, c, false, pushed)
}

// checkPush refuses a command that pushes a skill with an invalid reference, tag or upload.
func checkPush(c command.Command, b command.PushSkill) error {
	ref := b.Ref
	if ref.Slug == "" {
		ref.Slug = "x" // a valid placeholder: the slug comes from the front matter
	}
	if err := checkReference(ref); err != nil {
		return err
	}
	switch {
	case ref.Version != "":
		return invalidFieldError("version", "the push creates the version: leave version out")
	case !events.IsDigest(b.SHA256):
		return invalidFieldError("sha256", "must be a SHA-256 in hexadecimal digits")
	case b.Object != command.SkillUpload(c.Tenant, c.ID): // otherwise a client could read another client's upload
		return invalidFieldError("object", "the upload belongs to another command")
	}
	for i, t := range b.Tags {
		if !events.IsTag(t) {
			return invalidTagError(fmt.Sprintf("tag[%d]", i), t)
		}
	}
	return nil
}

// invalidTagError returns the refusal of a push with an invalid tag.
func invalidTagError(field, tag string) error {
	return invalidFieldError(field, fmt.Sprintf("%.64q is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, not begin with a dot or a hyphen, and not be a SHA-256", tag))
}

// answerOfRepeatedPush returns the answer to a push that was carried out before, without reading its upload. It returns
// the zero Answer if the push was not carried out before, or if its skill is not known yet.
func (h *Handler) answerOfRepeatedPush(ctx context.Context, c command.Command, b command.PushSkill) (command.Answer, error) {
	if b.DryRun || b.Ref.Slug == "" {
		return command.Answer{}, nil
	}
	e, err := h.cfg.Entries.Load(ctx, b.Ref.Subject(events.Skill, c.Tenant), eventlog.LeaderOnly)
	if err != nil {
		return command.Answer{}, err
	}
	if done, err := h.cfg.Entries.HasCommand(ctx, e, c.ID); !done || err != nil {
		return command.Answer{}, err
	}
	data, err := h.cfg.Entries.Resolve(ctx, events.Skill, c.Tenant, versionReference(b.Ref, b.SHA256))
	p, ok := data.(events.SkillPushed)
	var removed *eventlog.UnknownVersionError
	if errors.As(err, &removed) || err == nil && !ok {
		return command.Answer{}, nil // the version was removed meanwhile: the upload decides
	}
	if err != nil {
		return command.Answer{}, err
	}
	p.Tags = b.Tags
	return h.pushAnswer(ctx, c, p, e, e)
}

// appendVersion appends the version of a skill with a checked ZIP to the log. If dry is set, it appends nothing and
// only returns what the push would change.
func (h *Handler) appendVersion(ctx context.Context, c command.Command, dry bool, p events.SkillPushed) (command.Answer, error) {
	before, after, err := h.changeEntry(ctx, c, p.Ref, func(e eventlog.CatalogueEntry, meta events.CommandMeta) ([]events.Event, error) {
		list, err := versions.Decide(e.State, versions.ApplyVersion{CommandMeta: meta, Version: p.Ref.Version, Tags: p.Tags, Data: p})
		if dry {
			list = nil
		}
		return list, err
	})
	if err != nil {
		return command.Answer{}, err
	}
	return h.pushAnswer(ctx, c, p, before, after)
}

// pushAnswer returns the answer to the push p, given the catalogue entry of the skill before and after it.
func (h *Handler) pushAnswer(ctx context.Context, c command.Command, p events.SkillPushed, before, after eventlog.CatalogueEntry) (command.Answer, error) {
	same, err := h.existedBefore(ctx, c, before, p.Ref.Version)
	if err != nil {
		return command.Answer{}, err
	}
	p.Document = ""
	return command.Answer{Ref: &p.Ref, Same: same, Pushed: &p, Position: h.entryPosition(after)}, nil
}

// existedBefore reports whether the skill had the version with the digest before this command, which may be a
// repetition of an earlier one.
func (h *Handler) existedBefore(ctx context.Context, c command.Command, before eventlog.CatalogueEntry, digest string) (bool, error) {
	at := h.cfg.Entries.Position(before)
	at.Seq = before.State.CommitSeqOf(digest)
	if _, there := before.State.Resolve(digest); !there || at.Seq == 0 {
		return false, nil
	}
	rec, err := h.cfg.Entries.Log.CommitAt(ctx, at)
	return rec.Commit.ID != events.DeriveID(events.KindCommit, c.ID), err
}

// uploadedZIP is the ZIP of a push, in a temporary file without a name.
type uploadedZIP struct {
	file *os.File
	size int64
}

// close closes the temporary file, which removes it.
func (u *uploadedZIP) close() { _ = u.file.Close() } // the file has no name, so closing it removes it

// fetchUpload copies the ZIP of a push from the object store into a temporary file. The caller must close the result,
// which removes the file. The error is a *command.Error if the object does not exist or is damaged, and a *skill.Error
// if it is too large.
func (h *Handler) fetchUpload(ctx context.Context, b command.PushSkill) (*uploadedZIP, error) {
	content, err := h.keeper.store.Get(ctx, b.Object)
	if err != nil {
		return nil, uploadError(err)
	}
	defer func() { _ = content.Close() }()
	f, err := os.CreateTemp(h.cfg.Scratch, "skill-*.zip")
	if err != nil {
		return nil, fmt.Errorf("scratch: %w", err)
	}
	u := &uploadedZIP{file: f}
	if err = os.Remove(f.Name()); err == nil {
		u.size, err = copyAtMost(f, content, skill.MaxPackedSize)
	}
	if err != nil {
		u.close()
		return nil, uploadError(err)
	}
	return u, nil
}

// uploadError returns a refusal if err is the error of an uploaded object that does not exist or is damaged, and err
// itself otherwise.
func uploadError(err error) error {
	var corrupt *workspace.CorruptError
	switch {
	case errors.Is(err, workspace.ErrNotFound):
		return &command.Error{Code: codeUploadMissing, Field: "object", Detail: "the upload does not exist, or not any more: push again"}
	case errors.As(err, &corrupt):
		return &command.Error{Code: codeUploadMissing, Field: "object", Detail: "the upload is incomplete or damaged: push again"}
	}
	return err
}
