package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// skillCheckTimeout bounds how long the skills service may take to check a ZIP of the largest size.
const skillCheckTimeout = 2 * time.Minute

// SkillUpload is a ZIP with a skill that a client uploads, and the parameters of that request.
type SkillUpload struct {
	Ref    events.Reference // without a version; a slug of "" means the name in the ZIP
	Tags   []string
	DryRun bool
	SHA256 string // expected SHA-256 in hex; "" accepts any
	Body   io.Reader
	Length int64 // announced length in bytes; -1 if unknown
}

// SkillPushed is the response to the upload of a skill: it describes the ZIP, and the version of the skill that
// contains it.
type SkillPushed struct {
	Ref      SkillRef        `json:"ref"`
	Same     bool            `json:"same"`
	Skill    reads.SkillSpec `json:"skill"`
	Position string          `json:"position,omitempty"`
}

// SkillRef is a reference to a skill in the JSON of the API.
type SkillRef struct {
	Scope   string `json:"scope"`
	Org     string `json:"org,omitempty"`
	Slug    string `json:"slug"`
	Version string `json:"version,omitempty"`
}

// PushSkill stores a ZIP as an upload and sends a command to the skills service, which checks the ZIP and creates the version of the skill. It
// reads at most skill.MaxPackedSize bytes, and does not hold the ZIP in memory. With from.DryRun no version is created.
func (s *Server) PushSkill(ctx context.Context, from SkillUpload) (SkillPushed, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return SkillPushed{}, err
	}
	if err := checkSkillUpload(p, from); err != nil {
		return SkillPushed{}, err
	}
	if err := s.Skills.CheckRoom(ctx, from.Length); err != nil {
		return SkillPushed{}, err
	}
	id, err := events.NewID(events.KindCommand, s.Now(), s.Entropy)
	if err != nil {
		return SkillPushed{}, problem.From(err)
	}
	ref := withShortScope(from.Ref)
	r := withEntrySubject(skillKind(), p, ref, commands.Request{Type: command.TypePushSkill, Service: topology.ServiceSkills, ID: id, Timeout: skillCheckTimeout})
	if ref.Slug == "" { // the slug is known only after the check
		r.About = events.CatalogueID(events.Skill, r.Tenant, string(ref.Scope), ref.Org, id)
	}
	object := command.SkillUpload(r.Tenant, id)
	hold, err := s.Quota.Reserve(ctx, r.Tenant, max(from.Length, 0))
	if err != nil {
		return SkillPushed{}, err
	}
	stored, err := s.Skills.PutStream(ctx, object, from.Body, skill.MaxPackedSize, hold.ReserveBytes)
	a := command.Answer{}
	if err == nil {
		a, err = s.pushUpload(ctx, r, from, command.PushSkill{Ref: ref, Object: object, SHA256: stored.SHA256, Tags: from.Tags, DryRun: from.DryRun})
	}
	switch {
	case err == nil && !from.DryRun && a.Ref != nil:
		hold.SettleCopied(a.Ref.Subject(events.Skill, r.Tenant).ID, a.Position, s.Skills.RemovedFunc(object))
	default:
		hold.SettleRefused(s.Skills.RemovedFunc(object))
	}
	if errors.Is(err, objects.ErrTooLarge) {
		return SkillPushed{}, skillTooLarge("the ZIP is too large")
	}
	if err != nil {
		return SkillPushed{}, err
	}
	return skillPushed(ref, a), nil
}

// pushUpload sends the skills service the command to check a ZIP that is stored as an upload. It returns
// SKILL_DIGEST_MISMATCH if the ZIP does not have the SHA-256 that the client expects.
func (s *Server) pushUpload(ctx context.Context, r commands.Request, from SkillUpload, body command.PushSkill) (command.Answer, error) {
	if from.SHA256 != "" && from.SHA256 != body.SHA256 {
		return command.Answer{}, problem.New(problem.SkillDigest, "sha256", fmt.Sprintf("the received ZIP has the SHA-256 %s", body.SHA256))
	}
	r.Body, r.Reserved = body, true
	return s.sendChangeCommand(ctx, r)
}

// checkSkillUpload validates the parameters of the upload of a skill, before the ZIP is read.
func checkSkillUpload(p auth.Principal, from SkillUpload) error {
	named := from.Ref
	if named.Slug == "" {
		named.Slug = "unnamed" // a placeholder, so that the other parts can be checked
	}
	if err := named.Check(); err != nil {
		return referenceProblem("", err)
	}
	if err := errors.Join(checkMayWrite(p, from.Ref, "scope"), checkTags("tag", from.Tags)); err != nil {
		return err
	}
	switch {
	case from.SHA256 != "" && !events.IsDigest(from.SHA256):
		return problem.Invalid("sha256", "%+q is not a SHA-256 in lower-case hex", truncate.Text(from.SHA256, 100))
	case from.Length > skill.MaxPackedSize:
		return skillTooLarge(fmt.Sprintf("the ZIP has %d bytes", from.Length))
	}
	return nil
}

// skillTooLarge returns the problem for a ZIP of a skill that exceeds the size limit.
func skillTooLarge(what string) error {
	return problem.New(problem.PayloadTooLarge, "zip", fmt.Sprintf("%s; the limit is %d bytes", what, skill.MaxPackedSize))
}

// skillPushed converts the answer of the skills service to the response for the client.
func skillPushed(ref events.Reference, a command.Answer) SkillPushed {
	if a.Ref != nil {
		ref = *a.Ref
	}
	ref = reads.WithFullScope(ref)
	out := SkillPushed{Ref: SkillRef{string(ref.Scope), ref.Org, ref.Slug, ref.Version}, Same: a.Same, Position: a.Position}
	if d := a.Pushed; d != nil {
		out.Skill = reads.SkillSpec{Name: d.Name, Description: d.Description, Bytes: uint32(d.Bytes), UnpackedBytes: uint32(d.UnpackedBytes), Files: d.Files}
	}
	return out
}

// ListSkills lists the tenant's skills and the platform's.
func (s *Server) ListSkills(ctx context.Context, r *spoolv1.ListSkillsRequest) (*spoolv1.ListSkillsResponse, error) {
	list, next, err := s.readVersions(ctx, skillKind(), r)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.ListSkillsResponse{NextPageToken: next}
	for _, v := range list {
		one, err := skillMessage(v)
		if err != nil {
			return nil, err
		}
		out.Skills = append(out.Skills, one)
	}
	return out, nil
}

// GetSkill returns a version of a skill, with its document.
func (s *Server) GetSkill(ctx context.Context, r *spoolv1.GetSkillRequest) (*spoolv1.Skill, error) {
	ref, err := entryReference(r, r.GetVersion())
	if err != nil {
		return nil, err
	}
	v, err := s.readVersion(ctx, skillKind(), ref, r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	out, err := skillMessage(v)
	if err == nil {
		out.Document = &v.Document
	}
	return out, err
}

// skillMessage converts a version of a skill to an API message.
func skillMessage(v reads.Version) (*spoolv1.Skill, error) {
	var d reads.SkillSpec
	if err := json.Unmarshal([]byte(v.Spec), &d); err != nil {
		return nil, problem.New(problem.Internal, "", "a skill in the read models is not valid").WithCause(err)
	}
	return &spoolv1.Skill{
		Ref: referenceMessage(v.Ref), Tags: v.Tags, Name: d.Name, Description: d.Description, Bytes: d.Bytes, UnpackedBytes: d.UnpackedBytes, Files: d.Files,
		CreatedAt: wirejson.TimestampOf(v.CreatedAt),
	}, nil
}

// TagSkill sets a tag to a version of a skill, and removes it from any other version.
func (s *Server) TagSkill(ctx context.Context, r *spoolv1.TagSkillRequest) (*spoolv1.ApplyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	ref, err := entryReference(r, r.GetVersion())
	if err != nil {
		return nil, err
	}
	if err := checkMayWrite(p, ref, "scope"); err != nil {
		return nil, err
	}
	switch tag := r.GetTag(); {
	case !events.IsTag(tag):
		return nil, problem.Invalid("tag", "%+q is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, and not begin with a dot or a hyphen", truncate.Text(tag, 100))
	case ref.Version == "":
		return nil, problem.Invalid("version", "version is missing: set the tag or digest of the version to tag")
	}
	a, err := s.sendChangeCommand(ctx, withEntrySubject(skillKind(), p, ref, commands.Request{
		Type: command.TypeTagSkill, Service: topology.ServiceSkills, Body: command.TagSkill{Ref: ref, Tag: r.GetTag()},
	}))
	if err != nil {
		return nil, err
	}
	return applyResponse(ref, a), nil
}

// RemoveSkill hides a skill, or one version of it.
func (s *Server) RemoveSkill(ctx context.Context, r *spoolv1.RemoveSkillRequest) (*spoolv1.RemoveResponse, error) {
	ref, err := entryReference(r, r.GetVersion())
	if err != nil {
		return nil, err
	}
	if ref.Version != "" && !events.IsDigest(ref.Version) {
		return nil, problem.Invalid("version", "a version is removed by its digest; leave it out to remove the whole skill")
	}
	return s.removeEntry(ctx, skillKind(), commands.Request{Type: command.TypeRemoveSkill, Service: topology.ServiceSkills}, ref)
}

// SkillArchive describes the ZIP of a version of a skill.
type SkillArchive struct {
	Slug   string
	Digest string
	Size   int64 // bytes
}

// FindSkillArchive returns the description of the ZIP of a skill's version.
func (s *Server) FindSkillArchive(ctx context.Context, ref events.Reference, minPosition string) (SkillArchive, error) {
	if err := ref.Check(); err != nil {
		return SkillArchive{}, referenceProblem("", err)
	}
	v, err := s.readVersion(ctx, skillKind(), withShortScope(ref), minPosition)
	if err != nil {
		return SkillArchive{}, err
	}
	one, err := skillMessage(v)
	if err != nil {
		return SkillArchive{}, err
	}
	return SkillArchive{Slug: ref.Slug, Digest: v.Ref.Version, Size: int64(one.Bytes)}, nil
}

// OpenSkillArchive opens the content of the ZIP that a describes. The caller must close it.
func (s *Server) OpenSkillArchive(ctx context.Context, a SkillArchive) (io.ReadCloser, error) {
	r, err := s.Skills.Get(ctx, a.Digest)
	var refused *problem.Error
	switch {
	case err == nil:
		return r, nil
	case errors.As(err, &refused):
		return nil, err
	case errors.Is(err, workspace.ErrNotFound):
		return nil, problem.New(problem.Internal, "", "the ZIP of the skill is missing in the object store; the server's log says which").WithCause(err)
	}
	return nil, problem.New(problem.Unavailable, "", "the object store does not answer; try again").WithCause(err)
}
