package api

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Limits of requests about the catalogue.
const (
	MaxDefinitionBytes = 4 << 20 // bytes of a definition
	maxTags            = 64
	maxEnvironments    = definition.MaxEnvironments // references in one request
)

// entryKind describes a kind of catalogue entry (agent, instance, environment or skill): its name in messages, and the
// problem code for an entry of the kind that does not exist.
type entryKind struct {
	kind         events.Aspect
	noun         string
	notFoundCode problem.Code
}

// notFound returns the error for an entry or version that does not exist.
func (n entryKind) notFound(field string) error {
	return problem.New(n.notFoundCode, field, fmt.Sprintf("there is no such %s, or no such version of it", n.noun))
}

// agentKind describes agents.
func agentKind() entryKind { return entryKind{events.Agent, "agent", problem.AgentNotFound} }

// instanceKind describes instances.
func instanceKind() entryKind {
	return entryKind{events.Instance, "agent instance", problem.InstanceNotFound}
}

// environmentKind describes environments.
func environmentKind() entryKind {
	return entryKind{events.Environment, "environment", problem.EnvironmentNotFound}
}

// skillKind describes skills.
func skillKind() entryKind { return entryKind{events.Skill, "skill", problem.SkillNotFound} }

// referenceProblem converts an error about a reference to a problem that names the invalid field.
func referenceProblem(prefix string, err error) error {
	var wrong *events.ReferenceError
	if !errors.As(err, &wrong) {
		return problem.Invalid(prefix, "%s", err.Error())
	}
	field := wrong.Field
	switch {
	case prefix != "" && field != "":
		field = prefix + "." + field
	case prefix != "":
		field = prefix
	}
	return problem.Invalid(field, "%s", wrong.Detail)
}

// parseReference parses the string form of a reference; "" yields the zero reference.
func parseReference(field, s string) (events.Reference, error) {
	if s == "" {
		return events.Reference{}, nil
	}
	r, err := events.ParseReference(s)
	if err != nil {
		return r, problem.Invalid(field, "%s", err.Error())
	}
	return withShortScope(r), nil
}

// withShortScope returns the reference with the scope of an organization in its short form "", which the log uses.
func withShortScope(r events.Reference) events.Reference {
	if r.Scope == events.ScopeOrganization {
		r.Scope = ""
	}
	return r
}

// parseReferences parses a list of references; field is its name in the request.
func parseReferences(field string, list []string) ([]events.Reference, error) {
	if len(list) > maxEnvironments {
		return nil, problem.Invalid(field, "has %d entries; the limit is %d", len(list), maxEnvironments)
	}
	var out []events.Reference
	for i, s := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		if s == "" {
			return nil, problem.Invalid(at, "reference is empty")
		}
		r, err := parseReference(at, s)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// entryRequest is a request that names a catalogue entry in its path.
type entryRequest interface {
	GetSlug() string
	GetScope() string
	GetOrg() string
}

// entryReference returns the reference in the path of a request, with the given version.
func entryReference(r entryRequest, version string) (events.Reference, error) {
	ref := events.Reference{Scope: events.ReferenceScope(r.GetScope()), Org: r.GetOrg(), Slug: r.GetSlug(), Version: version}
	if err := ref.Check(); err != nil {
		return ref, referenceProblem("", err)
	}
	return withShortScope(ref), nil
}

// checkMayWrite returns a problem if the principal may not change the entry ref. Platform entries can be changed only
// with a key of tenant platform, which the root key creates, and on a server without keys. A key that is limited to
// agents can change only these.
func checkMayWrite(p auth.Principal, ref events.Reference, field string) error {
	if ref.Scope == events.ScopePlatform && !p.Admin && p.Tenant != events.PlatformTenant {
		return problem.New(problem.Forbidden, field, "the platform's entries are written with a key of tenant platform, which the root key creates; every tenant may read them")
	}
	// In the catalogue, a key that is limited to agents may change only agents; see auth.CheckAllowed.
	if !events.AllowsAgent(p.Agents, ref.Slug) {
		return problem.New(problem.Forbidden, "Authorization", "the key is limited to the agents "+strings.Join(p.Agents, ", "))
	}
	return nil
}

// applyRequest is a request to create a version of a catalogue entry.
type applyRequest interface {
	GetRef() *spoolv1.Reference
	GetTags() []string
	GetSpec() *spoolv1.Json
}

// decodeApplyRequest validates a request to create a version of a catalogue entry and decodes the definition into
// spec, without validating the definition. It returns the reference of the entry.
func decodeApplyRequest(p auth.Principal, r applyRequest, spec any) (events.Reference, error) {
	given := r.GetRef()
	if given == nil {
		return events.Reference{}, problem.Invalid("ref", "ref is missing: set at least ref.slug")
	}
	if given.GetVersion() != "" {
		return events.Reference{}, problem.Invalid("ref.version", "a version follows from the definition: leave it out")
	}
	ref := events.Reference{Scope: events.ReferenceScope(given.GetScope()), Org: given.GetOrg(), Slug: given.GetSlug()}
	if err := ref.Check(); err != nil {
		return ref, referenceProblem("ref", err)
	}
	if err := errors.Join(checkMayWrite(p, ref, "ref.scope"), checkTags("tags", r.GetTags())); err != nil {
		return ref, err
	}
	text := r.GetSpec().GetText()
	switch {
	case text == "":
		return ref, problem.Invalid("spec", "spec is missing")
	case len(text) > MaxDefinitionBytes:
		return ref, problem.New(problem.PayloadTooLarge, "spec", tooLargeDetail("the definition", len(text), MaxDefinitionBytes))
	}
	var bad *wirejson.FieldError
	if errors.As(wirejson.UnmarshalValue([]byte(text), "spec", spec), &bad) {
		return ref, problem.Invalid(bad.Field, "%s", bad.Detail)
	}
	return withShortScope(ref), nil
}

// checkTags returns a problem for the first tag that is not valid, or if there are too many. field is the name of the list.
func checkTags(field string, tags []string) error {
	if len(tags) > maxTags {
		return problem.Invalid(field, "has %d entries; the limit is %d", len(tags), maxTags)
	}
	for i, t := range tags {
		if !events.IsTag(t) {
			return problem.Invalid(fmt.Sprintf("%s[%d]", field, i), "%+q is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, and not begin with a dot or a hyphen", truncate.Text(t, 100))
		}
	}
	return nil
}

// withEntrySubject returns the command request r with the tenant and the id of the catalogue entry that ref names, as the
// subject of the command.
func withEntrySubject(n entryKind, p auth.Principal, ref events.Reference, r commands.Request) commands.Request {
	subject := ref.Subject(n.kind, p.Tenant)
	r.Tenant, r.About, r.Kind = subject.Tenant, subject.ID, n.kind
	return r
}

// applyResponse converts the answer of a service to a command about the catalogue entry ref.
func applyResponse(ref events.Reference, a command.Answer) *spoolv1.ApplyResponse {
	if a.Ref != nil {
		ref = *a.Ref
	}
	return &spoolv1.ApplyResponse{Ref: referenceMessage(ref), Position: a.Position, Same: a.Same}
}

// referenceMessage converts a reference to an API message.
func referenceMessage(ref events.Reference) *spoolv1.Reference {
	ref = reads.WithFullScope(ref)
	out := &spoolv1.Reference{Scope: string(ref.Scope), Slug: ref.Slug}
	if ref.Org != "" {
		out.Org = &ref.Org
	}
	if ref.Version != "" {
		out.Version = &ref.Version
	}
	return out
}

// removeEntry sends the command r, which hides an entry, or the version of a skill that ref names.
func (s *Server) removeEntry(ctx context.Context, n entryKind, r commands.Request, ref events.Reference) (*spoolv1.RemoveResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkMayWrite(p, ref, "scope"); err != nil {
		return nil, err
	}
	r.Body = command.RemoveEntry{Ref: ref}
	a, err := s.sendChangeCommand(ctx, withEntrySubject(n, p, ref, r))
	var refused *problem.Error
	if errors.As(err, &refused) && refused.Field == "ref" { // the request has its parts as separate fields
		refused.Field = "slug"
	}
	if err != nil {
		return nil, err
	}
	return &spoolv1.RemoveResponse{Position: a.Position}, nil
}

// readVersion returns a version of a catalogue entry. If the version does not exist, or the caller may not see it,
// readVersion returns the not-found problem of the kind n. It first blocks until the read models have reached
// minPosition.
func (s *Server) readVersion(ctx context.Context, n entryKind, ref events.Reference, minPosition string) (reads.Version, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return reads.Version{}, err
	}
	if err := s.Reads.AwaitMinPosition(ctx, ref.Subject(n.kind, p.Tenant).ID, minPosition); err != nil {
		return reads.Version{}, err
	}
	v, found, err := s.Reads.Definition(ctx, n.kind, p.Tenant, ref)
	if err == nil && found {
		found, err = mayUseVersion(p, n.kind, v)
	}
	if err == nil && !found {
		err = n.notFound("slug")
	}
	return v, err
}

// mayUseVersion reports whether the principal may use a version of a catalogue entry: a key that is limited to agents
// can only use these agents and their instances. Environments and skills belong to no agent, so every key can use
// them.
func mayUseVersion(p auth.Principal, kind events.Aspect, v reads.Version) (bool, error) {
	switch kind {
	case events.Agent:
		return events.AllowsAgent(p.Agents, v.Ref.Slug), nil
	case events.Instance:
		var spec events.InstanceSpec
		err := decodeSpec(v.Spec, &spec)
		return events.AllowsAgent(p.Agents, spec.Agent.Slug), err
	}
	return true, nil
}

// definitionMessage converts a version of a catalogue entry to an API message.
func definitionMessage(v reads.Version) *spoolv1.Definition {
	return &spoolv1.Definition{Ref: referenceMessage(v.Ref), Tags: v.Tags, Spec: wirejson.JSONFromText(v.Spec), CreatedAt: wirejson.TimestampOf(v.CreatedAt)}
}

// versionRequest is a request for one version of a catalogue entry.
type versionRequest interface {
	entryRequest
	GetVersion() string
	GetMinPosition() string
}

// getDefinition returns the version that a request names, as an API message.
func (s *Server) getDefinition(ctx context.Context, n entryKind, r versionRequest) (*spoolv1.Definition, error) {
	ref, err := entryReference(r, r.GetVersion())
	if err != nil {
		return nil, err
	}
	v, err := s.readVersion(ctx, n, ref, r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	return definitionMessage(v), nil
}

// pageRequest is a request for one page of a list.
type pageRequest interface {
	GetPageToken() string
	GetPageSize() uint32
}

// readVersions returns a page of the entries of a kind that the caller may see, each in its latest version, and the token of the next page.
func (s *Server) readVersions(ctx context.Context, n entryKind, r pageRequest) ([]reads.Version, string, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, "", err
	}
	return s.Reads.Definitions(ctx, n.kind, p.Tenant, p.Agents, r.GetPageToken(), r.GetPageSize())
}

// listDefinitions returns the entries that readVersions returns, as API messages.
func (s *Server) listDefinitions(ctx context.Context, n entryKind, r pageRequest) ([]*spoolv1.Definition, string, error) {
	list, next, err := s.readVersions(ctx, n, r)
	var out []*spoolv1.Definition
	for _, v := range list {
		out = append(out, definitionMessage(v))
	}
	return out, next, err
}
