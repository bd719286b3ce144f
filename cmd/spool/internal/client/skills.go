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

const typeZIP = "application/zip"

// Push holds the parameters with which a skill's ZIP is pushed.
type Push struct {
	Ref    events.Reference // without a version
	Tags   []string
	SHA256 string // of the ZIP, in hex
	DryRun bool
}

// PushSkill uploads a ZIP of size bytes. The response has the fields of ApplyResponse, and the skill.
func (c *Client) PushSkill(ctx context.Context, p Push, zip io.Reader, size int64) (Doc[*spoolv1.ApplyResponse], error) {
	q := entryQuery(p.Ref)
	q.Set("slug", p.Ref.Slug)
	q.Set("sha256", p.SHA256)
	for _, t := range p.Tags {
		q.Add("tag", t)
	}
	if p.DryRun {
		q.Set("dryRun", "true")
	}
	return upload[*spoolv1.ApplyResponse](ctx, c, call{method: http.MethodPost, path: []string{"api", "skills"}, query: q}, typeZIP, zip, size)
}

// Archive opens the ZIP of the version that a reference names.
func (c *Client) Archive(ctx context.Context, ref events.Reference) (io.ReadCloser, error) {
	q := entryQuery(ref)
	if ref.Version != "" {
		q.Set("version", ref.Version)
	}
	r, _, err := c.download(ctx, call{method: http.MethodGet, path: []string{"api", "skills", ref.Slug, "archive"}, query: q}, typeZIP)
	return r, err
}

// entryQuery returns the parameters that identify an entry together with its slug.
func entryQuery(ref events.Reference) url.Values {
	q := filter("scope", string(ref.Scope))
	if ref.Org != "" {
		q.Set("org", ref.Org)
	}
	return q
}
