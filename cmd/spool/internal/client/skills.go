package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// ZIPs of skills are sent over REST only, so spool.proto does not describe these two routes.

// zipMediaType is the media type of a ZIP archive.
const zipMediaType = "application/zip"

// SkillPush holds the parameters of an upload of a skill.
type SkillPush struct {
	Ref    events.Reference // without a version
	Tags   []string
	SHA256 string // hash of the ZIP, in hex
	DryRun bool
}

// PushSkill uploads the ZIP of a skill, which has size bytes. Raw of the response has the fields of ApplyResponse and
// the skill.
func (c *Client) PushSkill(ctx context.Context, p SkillPush, zip io.Reader, size int64) (APIObject[*spoolv1.ApplyResponse], error) {
	q := catalogueEntryQuery(p.Ref)
	q.Set("slug", p.Ref.Slug)
	q.Set("sha256", p.SHA256)
	for _, t := range p.Tags {
		q.Add("tag", t)
	}
	if p.DryRun {
		q.Set("dryRun", "true")
	}
	return upload[*spoolv1.ApplyResponse](ctx, c, apiCall{method: http.MethodPost, path: []string{"api", "skills"}, query: q}, zipMediaType, zip, size)
}

// GetSkillZIP opens the ZIP of the skill version that a reference names.
func (c *Client) GetSkillZIP(ctx context.Context, ref events.Reference) (io.ReadCloser, error) {
	q := catalogueEntryQuery(ref)
	if ref.Version != "" {
		q.Set("version", ref.Version)
	}
	r, _, err := c.startDownload(ctx, apiCall{method: http.MethodGet, path: []string{"api", "skills", ref.Slug, "archive"}, query: q}, zipMediaType)
	return r, err
}

// catalogueEntryQuery returns the query parameters that identify a catalogue entry together with its slug.
func catalogueEntryQuery(ref events.Reference) url.Values {
	q := optionalParameter("scope", string(ref.Scope))
	if ref.Org != "" {
		q.Set("org", ref.Org)
	}
	return q
}
