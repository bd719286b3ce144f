package reads

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Version is a version of a catalogue entry, as the read models contain it.
type Version struct {
	Ref       events.Reference // with the digest and an explicit scope
	Tags      []string         // tags of this version
	Spec      string           // JSON
	Document  string           // document of a skill; only set when one version is read
	CreatedAt time.Time
}

// SkillSpec is the definition of a version of a skill.
type SkillSpec struct {
	Name          string `json:"name"`
	Description   string `json:"description"`
	Bytes         uint32 `json:"bytes"`
	UnpackedBytes uint32 `json:"unpackedBytes"`
	Files         uint32 `json:"files"`
}

// Definition returns the version of a catalogue entry that the reference ref of a tenant names: "" and latest, a tag,
// or a digest. Only a digest finds versions of an entry that was removed. found is false if there is no such version,
// or if the entry belongs to another tenant.
func (s *Store) Definition(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (v Version, found bool, err error) {
	version := ref.Version
	if version == "" {
		version = events.LatestTag
	}
	subject := ref.Subject(kind, tenant)
	r, err := s.queries.Definition(ctx, queries.DefinitionParams{Tenant: subject.Tenant, Entry: subject.ID, Version: version})
	if errors.Is(err, pgx.ErrNoRows) {
		return Version{}, false, s.checkGroupFolded(ctx, subject.ID)
	}
	if err != nil {
		return Version{}, false, err
	}
	v = Version{Ref: WithFullScope(ref), Spec: r.Spec, Document: r.Document, CreatedAt: r.CreatedAt}
	v.Ref.Version = r.Version
	v.Tags, err = tagsOfVersion(r.State, r.Version)
	return v, true, err
}

// checkGroupFolded returns UNAVAILABLE while the projector group of a catalogue entry is being folded from the log's
// beginning, because an entry may be missing only for that reason.
func (s *Store) checkGroupFolded(ctx context.Context, id string) error {
	if c, err := s.groupCheckpoint(ctx, id); err != nil || c.CaughtUp {
		return err
	}
	return errReadModelsFolding()
}

// WithFullScope returns the reference with its scope written out, also if the scope is the tenant's.
func WithFullScope(r events.Reference) events.Reference {
	if r.Scope == "" {
		r.Scope = events.ScopeOrganization
	}
	return r
}

// tagsOfVersion returns the tags of a catalogue entry that refer to a version. state is the state of the entry in the
// read models.
func tagsOfVersion(state, version string) ([]string, error) {
	var known struct {
		Tags map[string]string `json:"tags"`
	}
	if err := json.Unmarshal([]byte(state), &known); err != nil {
		return nil, problem.New(problem.Internal, "", "an entry of the catalogue in the read models is not valid").WithCause(err)
	}
	var list []string
	for tag, digest := range known.Tags {
		if digest == version {
			list = append(list, tag)
		}
	}
	slices.Sort(list)
	return list, nil
}

// Definitions returns the latest versions of a tenant's entries, followed by those of the platform, without
// documents. If agents is not empty, it returns only agents and instances of these agents. A page also ends at 2 MiB
// but contains at least one entry. Definitions also returns the token of the next page.
func (s *Store) Definitions(ctx context.Context, kind events.Aspect, tenant string, agents []string, token string, size uint32) ([]Version, string, error) {
	after, err := decodeEntryToken(token)
	if err != nil {
		return nil, "", err
	}
	if size, err = ParsePageSize(size); err != nil {
		return nil, "", err
	}
	rows, err := s.queries.Definitions(ctx, queries.DefinitionsParams{
		Kind: string(kind), Tenant: tenant, Platform: events.PlatformTenant, AfterScope: string(after.Scope), AfterOrg: after.Org, AfterSlug: after.Slug,
		Agents: agents, Size: int32(size) + 1, Bytes: maxPageBytes,
	})
	if err != nil {
		return nil, "", err
	}
	var list []Version
	for _, r := range rows {
		v := Version{Ref: events.Reference{Scope: events.ReferenceScope(r.Scope), Org: r.Org, Slug: r.Slug, Version: r.Version}, Spec: r.Spec, CreatedAt: r.CreatedAt}
		if v.Tags, err = tagsOfVersion(r.State, r.Version); err != nil {
			return nil, "", err
		}
		list = append(list, v)
	}
	if list, _ = trimPage(list, size); len(list) > 0 && int64(len(list)) < rows[0].Found {
		return list, encodeEntryToken(list[len(list)-1].Ref), nil
	}
	return list, "", nil
}

// encodeEntryToken returns the token of the page that follows a catalogue entry.
func encodeEntryToken(r events.Reference) string {
	return base64.RawURLEncoding.EncodeToString([]byte(string(r.Scope) + "/" + r.Org + "/" + r.Slug))
}

// decodeEntryToken returns the catalogue entry of a token from encodeEntryToken, or the zero reference for "". It
// returns INVALID_REQUEST for other text.
func decodeEntryToken(token string) (events.Reference, error) {
	if token == "" {
		return events.Reference{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if parts := strings.Split(string(b), "/"); err == nil && len(parts) == 3 {
		r := events.Reference{Scope: events.ReferenceScope(parts[0]), Org: parts[1], Slug: parts[2]}
		if r.Check() == nil {
			return r, nil
		}
	}
	return events.Reference{}, problem.Invalid("pageToken", "%s is not the nextPageToken of a page of this list", fmt.Sprintf("%+q", truncate.Text(token, 64)))
}

// HasSealedSecret reports whether any version of an environment has a secret variable with that name whose encrypted value has
// the key storedKey in the bucket secrets.
func (s *Store) HasSealedSecret(ctx context.Context, tenant string, ref events.Reference, variable, storedKey string) (bool, error) {
	subject := ref.Subject(events.Environment, tenant)
	return s.queries.HasSealed(ctx, queries.HasSealedParams{Tenant: subject.Tenant, Entry: subject.ID, Name: variable, Key: storedKey})
}
