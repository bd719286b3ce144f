package reads

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
)

// Key is an API key that is neither revoked nor expired, with its rights.
type Key struct {
	Tenant string
	ID     string
	Role   events.Role
	Agents []string // slugs of the only agents that it may use; empty means all
}

// KeyExpired is the reason of key_refusal (see the migrations) for a key that has expired.
const KeyExpired = "expired"

// KeyByHash returns the key with a hash, unless it was revoked or has expired. Postgres compares the hashes, because
// the gateway's role may not read them.
func (s *Store) KeyByHash(ctx context.Context, sha256 string) (Key, bool, error) {
	r, err := s.queries.AcceptedKey(ctx, sha256)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Key{}, false, nil
	case err != nil:
		return Key{}, false, err
	}
	return Key{r.Tenant, r.ID, parseRole(r.Role), splitAgents(r.Agents)}, true, nil
}

// parseRole returns the role that the column role of keys means.
func parseRole(role string) events.Role { return events.KeyRights{Role: events.Role(role)}.RoleOf() }

// splitAgents splits the column agents of keys.
func splitAgents(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// Now returns the time of Postgres's clock, which determines the expiry of keys.
func (s *Store) Now(ctx context.Context) (time.Time, error) { return s.queries.Now(ctx) }

// KeyRefusals returns the reason why each key is not accepted: "" for an accepted key, revoked, or KeyExpired.
// Unknown ids have no entry.
func (s *Store) KeyRefusals(ctx context.Context, ids []string) (map[string]string, error) {
	rows, err := s.queries.KeyRefusals(ctx, ids)
	out := map[string]string{}
	for _, r := range rows {
		out[r.ID] = r.Reason
	}
	return out, err
}

// Keys returns a tenant's keys, newest first. If agents is not empty, it returns only keys that are limited to a
// subset of these agents.
func (s *Store) Keys(ctx context.Context, tenant string, agents []string) ([]*spoolv1.Key, error) {
	rows, err := s.queries.Keys(ctx, tenant, agents)
	var list []*spoolv1.Key
	for _, r := range rows {
		list = append(list, &spoolv1.Key{
			KeyId: r.ID, Name: r.Name, Prefix: r.Prefix, Role: string(parseRole(r.Role)), Agents: splitAgents(r.Agents), CreatedBy: nilIfEmpty(r.CreatedBy),
			CreatedAt: wirejson.TimestampOf(r.CreatedAt), RevokedAt: timestamp(r.RevokedAt), ExpiresAt: timestamp(r.ExpiresAt),
		})
	}
	return list, err
}
