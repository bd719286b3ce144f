package client

import (
	"context"
	"iter"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// Catalogue names a service of the API whose methods manage the definitions of agents, agent instances or environments.
// The requests and responses of the services differ only in the names of their messages, so a Client uses the messages
// of agents for all of them.
type Catalogue struct{ service, entry string }

// The lists of definitions.
var (
	Agents       = Catalogue{"Agents", "Agent"}
	Instances    = Catalogue{"Instances", "Instance"}
	Environments = Catalogue{"Environments", "Environment"}
)

func (c Catalogue) method(verb string) string { return "/spool.v1." + c.service + "/" + verb + c.entry }

// Apply creates a version of an entry. The spec is any value that is encoded as JSON.
func (c *Client) Apply(ctx context.Context, list Catalogue, ref events.Reference, tags []string, spec any) (*spoolv1.ApplyResponse, error) {
	text, err := encode(spec)
	if err != nil {
		return nil, err
	}
	request := &spoolv1.ApplyAgentRequest{Ref: &spoolv1.Reference{Scope: string(ref.Scope), Slug: ref.Slug}, Tags: tags, Spec: &spoolv1.Json{Text: string(text)}}
	if ref.Org != "" {
		request.Ref.Org = &ref.Org
	}
	response := &spoolv1.ApplyResponse{}
	return response, rest{c}.Invoke(ctx, list.method("Apply"), request, response)
}

// Definitions yields the latest version of each entry.
func (c *Client) Definitions(ctx context.Context, list Catalogue) iter.Seq2[Doc[*spoolv1.Definition], error] {
	switch list {
	case Agents:
		return List[*spoolv1.Definition](ctx, spoolv1.NewAgentsClient(rest{c}).ListAgents, &spoolv1.ListAgentsRequest{})
	case Instances:
		return List[*spoolv1.Definition](ctx, spoolv1.NewInstancesClient(rest{c}).ListInstances, &spoolv1.ListInstancesRequest{})
	}
	return List[*spoolv1.Definition](ctx, c.Environments.ListEnvironments, &spoolv1.ListEnvironmentsRequest{})
}

// Definition returns the version that a reference names.
func (c *Client) Definition(ctx context.Context, list Catalogue, ref events.Reference) (doc Doc[*spoolv1.Definition], err error) {
	request := &spoolv1.GetAgentRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org, Version: ref.Version}
	doc.Value = &spoolv1.Definition{}
	err = rest{c}.Invoke(ctx, list.method("Get"), request, doc.Value, rawOption{raw: &doc.Raw})
	return doc, err
}

// RemoveDefinition hides an entry.
func (c *Client) RemoveDefinition(ctx context.Context, list Catalogue, ref events.Reference) (doc Doc[*spoolv1.RemoveResponse], err error) {
	request := &spoolv1.RemoveAgentRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org}
	doc.Value = &spoolv1.RemoveResponse{}
	err = rest{c}.Invoke(ctx, list.method("Remove"), request, doc.Value, rawOption{raw: &doc.Raw})
	return doc, err
}

// Reference converts the reference of a response. The scope organization becomes "".
func Reference(r *spoolv1.Reference) events.Reference {
	ref := events.Reference{Scope: events.ReferenceScope(r.GetScope()), Org: r.GetOrg(), Slug: r.GetSlug()}.WithoutVersion()
	ref.Version = r.GetVersion()
	return ref
}
