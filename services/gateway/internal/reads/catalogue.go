package reads

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Version is a version of a catalogue entry.
type Version struct {
	Ref       events.Reference // with the digest and an explicit scope
	Tags      []string         // tags of this version
	Spec      string           // JSON
	Document  string           // document of a skill; only set when one version is read
	CreatedAt time.Time
}

// Skill is the spec of a version of a skill.
type Skill struct {
	Name          string `json:"name"`
	Description   string `json:"description"`
	Bytes         uint32 `json:"bytes"`
	UnpackedBytes uint32 `json:"unpackedBytes"`
	Files         uint32 `json:"files"`
}

// Definition returns the version that a reference means to a tenant: "" and latest, a tag, or a digest. Only a digest
// finds versions of an entry that was removed. found is false if there is none, or if the entry belongs to another
// tenant.
func (s *Store) Definition(ctx context.Context, kind events.Aspect, tenant string, ref events.Reference) (v Version, found bool, err error) {
	version := ref.Version
	if version == "" {
		version = events.Latest
	}
	subject := ref.Subject(kind, tenant)
	var state string
	v.Ref = Named(ref)
	found, err = s.one(ctx, []any{&state, &v.Ref.Version, &v.Spec, &v.Document, &v.CreatedAt}, `
		SELECT e.state, v.version, v.spec, v.document, v.created_at FROM catalogue_entries e
		  JOIN catalogue_versions v ON v.tenant = e.tenant AND v.id = e.id AND v.version = coalesce(e.state::json -> 'tags' ->> $3, $3)
		 WHERE e.tenant = $1 AND e.id = $2 AND NOT v.removed AND (v.version = $3 OR NOT e.removed)`, subject.Tenant, subject.ID, version)
	if err == nil && !found {
		err = s.folding(ctx, subject.ID)
	}
	if err == nil && found {
		v.Tags, err = tagsOf(state, v.Ref.Version)
	}
	return v, found, err
}

// folding returns an error while an entry may be missing only because it was not folded from the log yet.
func (s *Store) folding(ctx context.Context, id string) error {
	var caughtUp bool
	if _, err := s.one(ctx, []any{&caughtUp}, "SELECT caught_up FROM checkpoints WHERE grp = $1", readmodel.Group(id)); err != nil || caughtUp {
		return err
	}
	return folding()
}

// Named returns the reference with an explicit scope.
func Named(r events.Reference) events.Reference {
	if r.Scope == "" {
		r.Scope = events.ScopeOrganization
	}
	return r
}

// tagsOf returns the tags of a version.
func tagsOf(state, version string) ([]string, error) {
	var known struct {
		Tags map[string]string `json:"tags"`
	}
	if err := json.Unmarshal([]byte(state), &known); err != nil {
		return nil, problem.New(problem.Internal, "", "an entry of the catalogue in the read models is not valid").Because(err)
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
	after, err := readEntryToken(token)
	if err != nil {
		return nil, "", err
	}
	if size, err = PageSize(size); err != nil {
		return nil, "", err
	}
	var list []Version
	there := 0
	err = s.rows(ctx, func(r row) error {
		var v Version
		var state string
		err := r.Scan(&v.Ref.Scope, &v.Ref.Org, &v.Ref.Slug, &v.Ref.Version, &state, &v.Spec, &v.CreatedAt, &there)
		if err == nil {
			v.Tags, err = tagsOf(state, v.Ref.Version)
		}
		list = append(list, v)
		return err
	}, `
		SELECT scope, org, slug, version, state, spec, created_at, there FROM (
			SELECT e.scope, e.org, e.slug, v.version, e.state, v.spec, v.created_at, count(*) OVER () AS there,
			       sum(octet_length(v.spec)) OVER (ORDER BY e.scope, e.org, e.slug) - octet_length(v.spec) AS before
			  FROM (SELECT * FROM catalogue_entries
			         WHERE kind = $1 AND NOT removed AND (tenant = $2 OR tenant = $3 AND scope = 'platform') AND (scope, org, slug) > ($4, $5, $6)
			           AND ($9::text[] IS NULL OR kind = 'agent' AND slug = ANY ($9) OR kind NOT IN ('agent', 'instance') OR kind = 'instance' AND EXISTS (
			               SELECT FROM catalogue_versions i WHERE i.tenant = catalogue_entries.tenant AND i.id = catalogue_entries.id AND i.version = latest
			                  AND i.spec::json #>> '{agent,slug}' = ANY ($9)))
			         ORDER BY scope, org, slug LIMIT $7) e
			  JOIN catalogue_versions v ON v.tenant = e.tenant AND v.id = e.id AND v.version = e.latest) page
		 WHERE before < $8 ORDER BY scope, org, slug`,
		string(kind), tenant, events.PlatformTenant, string(after.Scope), after.Org, after.Slug, size+1, maxPageBytes, agents)
	if err != nil {
		return nil, "", err
	}
	if list, _ = cut(list, size); len(list) < there {
		return list, entryToken(list[len(list)-1].Ref), nil
	}
	return list, "", nil
}

// entryToken returns the page token for the entry at which a page ended.
func entryToken(r events.Reference) string {
	return base64.RawURLEncoding.EncodeToString([]byte(string(r.Scope) + "/" + r.Org + "/" + r.Slug))
}

func readEntryToken(token string) (events.Reference, error) {
	if token == "" {
		return events.Reference{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if parts := strings.Split(string(b), "/"); err == nil && len(parts) == 3 {
		r := events.Reference{Scope: events.Scope(parts[0]), Org: parts[1], Slug: parts[2]}
		if r.Check() == nil {
			return r, nil
		}
	}
	return events.Reference{}, problem.Invalid("pageToken", "%s is not the nextPageToken of a page of this list", fmt.Sprintf("%+q", truncate.Text(token, 64)))
}

// HasSealed reports whether any version of an environment has a secret with that name and key.
func (s *Store) HasSealed(ctx context.Context, tenant string, ref events.Reference, name, key string) (bool, error) {
	subject := ref.Subject(events.Environment, tenant)
	var there bool
	_, err := s.one(ctx, []any{&there}, `
		SELECT EXISTS (SELECT FROM catalogue_versions
		                WHERE tenant = $1 AND id = $2 AND spec::json -> 'variables' -> $3 ->> 'sealed' = $4)`,
		subject.Tenant, subject.ID, name, key)
	return there, err
}
