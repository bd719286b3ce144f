package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

const (
	// defaultInstanceSuffix ends the slug of an agent's default instance.
	defaultInstanceSuffix = ".default"
	maxSlugLength         = 64
	// platformOrg is the organization of the default instances of platform agents. Each tenant has a default instance
	// of its own.
	platformOrg = "platform"
)

// DefaultInstance returns the reference of an agent's default instance, without a version: the agent's slug with ".default" appended, in
// the agent's scope and organization. For a platform agent each tenant has a default instance of its own, in organization platform,
// or platform.ORG for an agent of organization ORG. A slug or an organization that would be too long is cut and ends in a hash.
func DefaultInstance(agent events.Reference) events.Reference {
	ref := events.Reference{Scope: agent.Scope, Org: agent.Org, Slug: appendSuffix(agent.Slug, defaultInstanceSuffix)}
	if agent.Scope == events.ScopePlatform {
		ref.Scope, ref.Org = "", platformOrg
		if agent.Org != "" {
			ref.Org = appendSuffix(platformOrg+"."+agent.Org, "")
		}
	}
	return ref.WithoutVersion()
}

// appendSuffix appends a suffix to a slug. It shortens the slug if the result would be too long.
func appendSuffix(slug, suffix string) string {
	if len(slug)+len(suffix) <= maxSlugLength {
		return slug + suffix
	}
	sum := sha256.Sum256([]byte(slug))
	hash := "-" + hex.EncodeToString(sum[:6])
	return strings.TrimRight(slug[:maxSlugLength-len(suffix)-len(hash)], ".-") + hash + suffix
}

// setDefaultInstance sets the instance of a new session that names only an agent to the agent's default instance. The
// built-in agent has none. It must be called after all checks of the request, because it may create the instance.
func (h *Handler) setDefaultInstance(ctx context.Context, c command.Command, out *events.SessionCreated) (err error) {
	if out.AgentRef.Slug != "" && out.Instance.Slug == "" {
		out.Instance, err = h.defaultInstance(ctx, c, out.AgentRef)
	}
	return err
}

// defaultInstance returns a reference to the latest version of an agent's default instance. If there is none, it
// creates the instance, also if several requests arrive at the same time only once. A tenant may apply its own versions
// of the instance, with environments, which are then the latest.
func (h *Handler) defaultInstance(ctx context.Context, c command.Command, agent events.Reference) (events.Reference, error) {
	ref, agent := DefaultInstance(agent), agent.WithoutVersion()
	entries := eventlog.Catalogue{Log: h.cfg.Sessions.Log}
	p, err := entries.Resolve(ctx, events.Instance, c.Tenant, ref)
	var none *eventlog.UnknownVersionError
	if errors.As(err, &none) {
		var made events.Reference
		if made, err = h.createDefaultInstance(ctx, c, ref, agent); err != nil {
			return made, err
		}
		if p, err = entries.Resolve(ctx, events.Instance, c.Tenant, ref); errors.As(err, &none) { // the instance was removed before this command was redelivered
			return made, nil
		}
	}
	if err != nil {
		return events.Reference{}, err
	}
	applied, ok := p.(events.InstanceApplied)
	if !ok {
		return events.Reference{}, fmt.Errorf("instance %s is a %T", ref, p)
	}
	if of := applied.Spec.Agent.WithoutVersion(); of != agent {
		return events.Reference{}, invalidFieldError("agent", fmt.Sprintf("its default instance %s is of agent %s: apply a version of %s for agent %s, or name an instance", ref, of, ref, agent))
	}
	return applied.Ref, nil
}

// createDefaultInstance creates the default instance ref of an agent, unless another request has created it meanwhile.
func (h *Handler) createDefaultInstance(ctx context.Context, c command.Command, ref, agent events.Reference) (events.Reference, error) {
	spec := events.InstanceSpec{Description: "What a session gets that names only the agent.", Agent: agent}
	digest, err := definition.Digest(spec)
	if err != nil {
		return ref, fmt.Errorf("digest of instance %s: %w", ref, err)
	}
	ref.Version = digest
	own := c // the command of the instance's own commit, whose ids must differ from those of the session
	own.ID, own.Actor.Kind, own.Actor.ID = events.DeriveID(events.KindCommand, c.ID, "instance"), "service", "session"
	_, err = h.decideEntry(ctx, own, ref.Subject(events.Instance, c.Tenant), func(m events.CommandMeta) versions.Command {
		return versions.ApplyVersion{CommandMeta: m, Version: digest, OnlyFirst: true, Data: events.InstanceApplied{Ref: ref, Spec: spec}}
	})
	return ref, err
}
