package api

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const maxKeyName = 100 // characters

// CreateKey creates an API key and returns it. The key cannot be read again later. CreateKey blocks until gateways accept the key, unless the read
// models are behind.
func (s *Server) CreateKey(ctx context.Context, r *spoolv1.CreateKeyRequest) (*spoolv1.CreateKeyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	tenant, err := keyTenant(p, r.GetTenant())
	if err != nil {
		return nil, err
	}
	if name := strings.TrimSpace(r.GetName()); name == "" || utf8.RuneCountInString(name) > maxKeyName {
		return nil, problem.Invalid("name", "name must have 1 to %d characters", maxKeyName)
	}
	id, err := events.NewID(events.KindKey, s.Now(), s.Entropy)
	if err != nil {
		return nil, problem.From(err)
	}
	key, err := auth.NewKey(s.Entropy)
	if err != nil {
		return nil, problem.From(err)
	}
	rights, err := s.requestedKeyRights(ctx, r)
	if err != nil {
		return nil, err
	}
	about := keyCatalogueID(tenant, id)
	a, err := s.Send.Send(ctx, commands.Request{
		Type: command.TypeCreateKey, Principal: p, Tenant: tenant, About: about,
		Body: command.CreateKey{KeyID: id, Name: r.GetName(), Prefix: auth.DisplayPrefix(key), SHA256: auth.HashKey(key), Rights: rights},
	})
	if err != nil {
		return nil, err
	}
	// The key exists and can be returned only now, so a late read model must not be an error.
	_ = s.Reads.AwaitMinPosition(ctx, about, a.Position)
	if a.Rights != nil {
		rights = *a.Rights
	}
	out := &spoolv1.CreateKeyResponse{
		KeyId: id, Key: key, Name: r.GetName(), Prefix: auth.DisplayPrefix(key), Tenant: tenant, Position: a.Position, Role: string(rights.EffectiveRole()), Agents: rights.Agents,
	}
	if !rights.ExpiresAt.IsZero() {
		out.ExpiresAt = wirejson.TimestampOf(rights.ExpiresAt)
	}
	return out, nil
}

// requestedKeyRights returns the role, agents and expiry that a request asks for a new API key. The session service
// compares them with the rights of the caller's key.
func (s *Server) requestedKeyRights(ctx context.Context, r *spoolv1.CreateKeyRequest) (events.KeyRights, error) {
	rights := events.KeyRights{Role: events.KeyRole(r.GetRole()), Agents: r.GetAgents()}
	text := r.GetExpires()
	if text == "" {
		return rights, nil
	}
	now, err := s.Reads.PostgresTime(ctx)
	if err != nil {
		return rights, err
	}
	if after, err := time.ParseDuration(text); err == nil {
		rights.ExpiresAt = now.Add(after)
	} else if rights.ExpiresAt, err = time.Parse(time.RFC3339, text); err != nil {
		return rights, problem.Invalid("expires", "%+q is neither a duration, such as 720h, nor a time in RFC 3339, such as 2026-01-31T12:00:00Z", truncate.Text(text, 100))
	}
	if !rights.ExpiresAt.After(now) {
		return rights, problem.Invalid("expires", "%+q is not in the future: the database's clock says %s", truncate.Text(text, 100), now.UTC().Format(time.RFC3339))
	}
	rights.ExpiresAt = rights.ExpiresAt.UTC().Truncate(time.Millisecond)
	return rights, nil
}

// keyTenant returns the tenant whose keys a request is about: the caller's, or the one that an admin names.
func keyTenant(p auth.Principal, tenant string) (string, error) {
	if tenant == "" {
		tenant = p.Tenant
	}
	if err := events.CheckTenant("tenant", tenant); err != nil {
		return "", problem.Invalid("tenant", "%s", strings.TrimPrefix(err.Error(), "tenant: "))
	}
	if !p.Admin && tenant != p.Tenant {
		return "", problem.New(problem.Forbidden, "tenant", "a key only manages the keys of its own tenant; the root key manages those of others")
	}
	if tenant == events.PlatformTenant && !p.Admin {
		return "", problem.New(problem.Forbidden, "tenant", "the keys of tenant platform, which owns the shared entries, are managed with the root key")
	}
	return tenant, nil
}

// keyCatalogueID returns the id under which the catalogue in the log has an API key.
func keyCatalogueID(tenant, id string) string {
	return events.CatalogueID(events.Key, tenant, "", "", id)
}

// ListKeys lists the tenant's keys.
func (s *Server) ListKeys(ctx context.Context, r *spoolv1.ListKeysRequest) (*spoolv1.ListKeysResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	tenant, err := keyTenant(p, r.GetTenant())
	if err != nil {
		return nil, err
	}
	list, err := s.Reads.Keys(ctx, tenant, p.Agents)
	return &spoolv1.ListKeysResponse{Keys: list}, err
}

// RevokeKey revokes a key, and all keys that were created with it, directly or through other keys. It blocks until
// all gateways refuse these keys.
func (s *Server) RevokeKey(ctx context.Context, r *spoolv1.RevokeKeyRequest) (*spoolv1.RevokeKeyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	tenant, err := keyTenant(p, r.GetTenant())
	if err != nil {
		return nil, err
	}
	if err := reads.CheckKeyID(r.GetKeyId()); err != nil {
		return nil, err
	}
	about := keyCatalogueID(tenant, r.GetKeyId())
	a, err := s.Send.Send(ctx, commands.Request{
		Type: command.TypeRevokeKey, Principal: p, Tenant: tenant, About: about, Body: command.RevokeKey{KeyID: r.GetKeyId()},
	})
	if err != nil {
		return nil, err
	}
	err = s.Reads.AwaitMinPosition(ctx, about, a.Position)
	out := &spoolv1.RevokeKeyResponse{KeyId: r.GetKeyId(), Position: a.Position}
	for _, descendant := range a.Revoked {
		out.Revoked = append(out.Revoked, descendant.KeyID)
		err = errors.Join(err, s.Reads.AwaitMinPosition(ctx, keyCatalogueID(tenant, descendant.KeyID), descendant.Position))
	}
	if err != nil {
		return nil, problem.New(problem.ReadModelBehind, "", "the key is revoked in the log, but is accepted until the projector has caught up; repeat the request to see when").WithCause(err)
	}
	return out, nil
}
