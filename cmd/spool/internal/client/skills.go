package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

const typeZIP = "application/zip"

// Skill is a version of a skill.
type Skill struct {
	Ref           events.Reference `json:"ref"`  // with the digest
	Tags          []string         `json:"tags"` // that name this version
	Name          string           `json:"name"`
	Description   string           `json:"description"`
	Bytes         uint64           `json:"bytes"` // of the ZIP
	UnpackedBytes uint64           `json:"unpackedBytes"`
	Files         uint32           `json:"files"`
	CreatedAt     time.Time        `json:"createdAt"`
	Document      string           `json:"document"` // SKILL.md; "" in lists
}

// Push says what a ZIP is pushed as.
type Push struct {
	Ref    events.Reference // without a version
	Tags   []string
	SHA256 string // of the ZIP, in hex
	DryRun bool
}

// Pushed is the version that holds after a push.
type Pushed struct {
	Ref      events.Reference `json:"ref"`
	Same     bool             `json:"same"` // it was there already
	Skill    Skill            `json:"skill"`
	Position string           `json:"position"`
}

// PushSkill sends a ZIP of so many bytes.
func (c *Client) PushSkill(ctx context.Context, p Push, zip io.Reader, size int64) (Doc[Pushed], error) {
	q := entry(p.Ref)
	q.Set("slug", p.Ref.Slug)
	q.Set("sha256", p.SHA256)
	for _, t := range p.Tags {
		q.Add("tag", t)
	}
	if p.DryRun {
		q.Set("dryRun", "true")
	}
	return upload[Pushed](ctx, c, call{method: http.MethodPost, path: []string{"api", "skills"}, query: q}, typeZIP, zip, size)
}

// Skills yields the latest version of each skill.
func (c *Client) Skills(ctx context.Context) iter.Seq2[Doc[Skill], error] {
	return pages[Skill](ctx, c, "skills", url.Values{}, "api", "skills")
}

// Skill reads the version that a reference names, with its document.
func (c *Client) Skill(ctx context.Context, ref events.Reference) (Doc[Skill], error) {
	var out Doc[Skill]
	err := c.get(ctx, &out, version(ref), "api", "skills", ref.Slug)
	return out, err
}

// Archive opens the ZIP of the version that a reference names.
func (c *Client) Archive(ctx context.Context, ref events.Reference) (io.ReadCloser, error) {
	r, _, err := c.download(ctx, call{method: http.MethodGet, path: []string{"api", "skills", ref.Slug, "archive"}, query: version(ref)}, typeZIP)
	return r, err
}

// TagSkill moves a tag to the version that a reference names.
func (c *Client) TagSkill(ctx context.Context, ref events.Reference, tag string) (Doc[Applied], error) {
	body := struct {
		Scope   events.Scope `json:"scope,omitempty"`
		Org     string       `json:"org,omitempty"`
		Version string       `json:"version,omitempty"`
		Tag     string       `json:"tag"`
	}{ref.Scope, ref.Org, ref.Version, tag}
	var out Doc[Applied]
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", "skills", ref.Slug, "tags"}, body: body, repeat: true}, &out)
	return out, err
}

// RemoveSkill hides a skill, or the version that a reference names.
func (c *Client) RemoveSkill(ctx context.Context, ref events.Reference) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", "skills", ref.Slug}, query: version(ref), repeat: true}, &out)
	return out, err
}

// version is what names a version beside its slug.
func version(ref events.Reference) url.Values {
	q := entry(ref)
	if ref.Version != "" {
		q.Set("version", ref.Version)
	}
	return q
}
