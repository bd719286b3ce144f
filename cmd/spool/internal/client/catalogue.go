package client

import (
	"context"
	"iter"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// CatalogueService names a service of the API whose methods manage the definitions of agents, agent instances or
// environments. The requests and responses of the services differ only in the names of their messages, so a Client uses
// the messages of agents for all of them.
type CatalogueService struct{ service, entry string }

// The services for the three kinds of definitions.
var (
	Agents       = CatalogueService{"Agents", "Agent"}
	Instances    = CatalogueService{"Instances", "Instance"}
	Environments = CatalogueService{"Environments", "Environment"}
)

// methodName returns the full gRPC name of a method of the service, such as "/spool.v1.Agents/ApplyAgent" for the verb
// Apply.
func (c CatalogueService) methodName(verb string) string {
	return "/spool.v1." + c.service + "/" + verb + c.entry
}

// ApplyDefinition stores a version of a catalogue entry. spec is any value that is encoded as JSON.
func (c *Client) ApplyDefinition(ctx context.Context, service CatalogueService, ref events.Reference, tags []string, spec any) (*spoolv1.ApplyResponse, error) {
	text, err := encodeJSON(spec)
	if err != nil {
		return nil, err
	}
	request := &spoolv1.ApplyAgentRequest{Ref: &spoolv1.Reference{Scope: string(ref.Scope), Slug: ref.Slug}, Tags: tags, Spec: &spoolv1.Json{Text: string(text)}}
	if ref.Org != "" {
		request.Ref.Org = &ref.Org
	}
	response := &spoolv1.ApplyResponse{}
	return response, restConn{c}.Invoke(ctx, service.methodName("Apply"), request, response)
}

// ListDefinitions yields the latest version of each entry of a kind: of agents, instances or environments.
func (c *Client) ListDefinitions(ctx context.Context, service CatalogueService) iter.Seq2[APIObject[*spoolv1.Definition], error] {
	switch service {
	case Agents:
		return List[*spoolv1.Definition](ctx, spoolv1.NewAgentsClient(restConn{c}).ListAgents, &spoolv1.ListAgentsRequest{})
	case Instances:
		return List[*spoolv1.Definition](ctx, spoolv1.NewInstancesClient(restConn{c}).ListInstances, &spoolv1.ListInstancesRequest{})
	}
	return List[*spoolv1.Definition](ctx, c.Environments.ListEnvironments, &spoolv1.ListEnvironmentsRequest{})
}

// GetDefinition returns the version of a catalogue entry that a reference names.
func (c *Client) GetDefinition(ctx context.Context, service CatalogueService, ref events.Reference) (doc APIObject[*spoolv1.Definition], err error) {
	request := &spoolv1.GetAgentRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org, Version: ref.Version}
	doc.Value = &spoolv1.Definition{}
	err = restConn{c}.Invoke(ctx, service.methodName("Get"), request, doc.Value, rawResponseOption{raw: &doc.Raw})
	return doc, err
}

// RemoveDefinition hides a catalogue entry, so that new sessions cannot use it.
func (c *Client) RemoveDefinition(ctx context.Context, service CatalogueService, ref events.Reference) (doc APIObject[*spoolv1.RemoveResponse], err error) {
	request := &spoolv1.RemoveAgentRequest{Slug: ref.Slug, Scope: string(ref.Scope), Org: ref.Org}
	doc.Value = &spoolv1.RemoveResponse{}
	err = restConn{c}.Invoke(ctx, service.methodName("Remove"), request, doc.Value, rawResponseOption{raw: &doc.Raw})
	return doc, err
}

// Reference converts a reference in a response of the API. The scope "organization" becomes "".
func Reference(r *spoolv1.Reference) events.Reference {
	ref := events.Reference{Scope: events.ReferenceScope(r.GetScope()), Org: r.GetOrg(), Slug: r.GetSlug()}.WithoutVersion()
	ref.Version = r.GetVersion()
	return ref
}
