package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Catalogue is a list of the catalogue, by its name in routes and answers.
type Catalogue string

// The lists.
const (
	Agents       Catalogue = "agents"
	Instances    Catalogue = "instances"
	Environments Catalogue = "environments"
)

// Definition is a version of an entry of the catalogue.
type Definition struct {
	Ref       events.Reference `json:"ref"`  // with the digest
	Tags      []string         `json:"tags"` // that name this version
	Spec      json.RawMessage  `json:"spec"` // as it was applied
	CreatedAt time.Time        `json:"createdAt"`
}

// Apply asks for a version of an entry.
type Apply struct {
	Ref  events.Reference `json:"ref"` // without a version
	Tags []string         `json:"tags,omitempty"`
	Spec any              `json:"spec"`
}

// Applied is the version that holds after an Apply.
type Applied struct {
	Ref      events.Reference `json:"ref"`
	Position string           `json:"position"`
	Same     bool             `json:"same"` // it was there already
}

// Explain names what variables are to come from: references, or nothing.
type Explain struct {
	Agent        string   `json:"agent,omitempty"`
	Instance     string   `json:"instance,omitempty"`
	Environments []string `json:"environments,omitempty"`
}

// Explained is where a variable's value would come from.
type Explained struct {
	Name   string `json:"name"`
	From   string `json:"from"`
	Secret bool   `json:"secret"`
	Value  string `json:"value,omitempty"` // never a secret's
}

// Apply makes a version. It is sent again, with the same Idempotency-Key, when the outcome is not known.
func (c *Client) Apply(ctx context.Context, list Catalogue, a Apply) (Applied, error) {
	var out Applied
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", string(list)}, body: a, key: rand.Text(), repeat: true}, &out)
	return out, err
}

// Definitions yields the latest version of each entry.
func (c *Client) Definitions(ctx context.Context, list Catalogue) iter.Seq2[Doc[Definition], error] {
	return pages[Definition](ctx, c, string(list), url.Values{}, "api", string(list))
}

// Definition reads the version that a reference names.
func (c *Client) Definition(ctx context.Context, list Catalogue, ref events.Reference) (Doc[Definition], error) {
	q := entry(ref)
	if ref.Version != "" {
		q.Set("version", ref.Version)
	}
	var out Doc[Definition]
	err := c.get(ctx, &out, q, "api", string(list), ref.Slug)
	return out, err
}

// RemoveDefinition hides an entry.
func (c *Client) RemoveDefinition(ctx context.Context, list Catalogue, ref events.Reference) (Doc[Accepted], error) {
	var out Doc[Accepted]
	err := c.do(ctx, call{method: http.MethodDelete, path: []string{"api", string(list), ref.Slug}, query: entry(ref), repeat: true}, &out)
	return out, err
}

// entry is what names an entry beside its slug.
func entry(ref events.Reference) url.Values {
	q := url.Values{}
	if ref.Scope != "" {
		q.Set("scope", string(ref.Scope))
	}
	if ref.Org != "" {
		q.Set("org", ref.Org)
	}
	return q
}

// ExplainedHost is an entry of what sandboxes could reach.
type ExplainedHost struct {
	Entry string `json:"entry"`
	From  string `json:"from"`
}

// Explanation is what an execution would have.
type Explanation struct {
	Variables []Explained     `json:"variables"`
	Egress    []ExplainedHost `json:"egress"`
}

// ExplainEnvironment tells where each variable and each allowed host would come from. What a server should
// send as a secret's value, it does not give.
func (c *Client) ExplainEnvironment(ctx context.Context, e Explain) (Explanation, error) {
	var out Explanation
	err := c.do(ctx, call{method: http.MethodPost, path: []string{"api", string(Environments), "explain"}, body: e, repeat: true}, &out)
	for i := range out.Variables {
		if out.Variables[i].Secret {
			out.Variables[i].Value = ""
		}
	}
	return out, err
}
