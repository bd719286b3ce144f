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

// APIKey is an API key that is neither revoked nor expired, with its rights.
type APIKey struct {
	Tenant string
	ID     string
	Role   events.KeyRole
	Agents []string // slugs of the only agents that it may use; empty means all
}

// KeyExpired is the reason for which a key that has expired is refused, as the SQL function key_refusal of the
// migrations returns it.
const KeyExpired = "expired"

// KeyByHash returns the key with a hash, unless it was revoked or has expired. Postgres compares the hashes, because
// the gateway's role may not read them.
func (s *Store) KeyByHash(ctx context.Context, sha256 string) (APIKey, bool, error) {
	r, err := s.queries.AcceptedKey(ctx, sha256)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return APIKey{}, false, nil
	case err != nil:
		return APIKey{}, false, err
	}
	return APIKey{r.Tenant, r.ID, parseRole(r.Role), splitAgentSlugs(r.Agents)}, true, nil
}

// parseRole converts the column role of an API key in the read models to a role.
func parseRole(role string) events.KeyRole {
	return events.KeyRights{Role: events.KeyRole(role)}.EffectiveRole()
}

// splitAgentSlugs splits the column agents of an API key in the read models into the slugs of agents.
func splitAgentSlugs(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// PostgresTime returns the time of Postgres's clock, which determines the expiry of keys.
func (s *Store) PostgresTime(ctx context.Context) (time.Time, error) { return s.queries.Now(ctx) }

// KeyRefusals returns, by the id of the key, the reason why each API key is refused: "" for an accepted key,
// "revoked", or KeyExpired. Unknown ids have no entry.
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
			KeyId: r.ID, Name: r.Name, Prefix: r.Prefix, Role: string(parseRole(r.Role)), Agents: splitAgentSlugs(r.Agents), CreatedBy: nilIfEmpty(r.CreatedBy),
			CreatedAt: wirejson.TimestampOf(r.CreatedAt), RevokedAt: timestampMessage(r.RevokedAt), ExpiresAt: timestampMessage(r.ExpiresAt),
		})
	}
	return list, err
}
