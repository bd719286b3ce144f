package reads

import (
	"context"
	"strings"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
)

// Key is an accepted API key.
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
	var k Key
	var rights events.KeyRights
	var agents string
	found, err := s.one(ctx, []any{&k.Tenant, &k.ID, &rights.Role, &agents}, "SELECT tenant, id, role, agents FROM accepted_key($1)", sha256)
	k.Role, k.Agents = rights.RoleOf(), splitAgents(agents)
	return k, found, err
}

// splitAgents splits the column agents of keys.
func splitAgents(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// Now returns the time of Postgres's clock, which determines the expiry of keys.
func (s *Store) Now(ctx context.Context) (now time.Time, err error) {
	_, err = s.one(ctx, []any{&now}, "SELECT now()")
	return now, err
}

// KeyRefusals returns the reason why each key is not accepted: "" for an accepted key, revoked, or KeyExpired.
// Unknown ids have no entry.
func (s *Store) KeyRefusals(ctx context.Context, ids []string) (map[string]string, error) {
	out := map[string]string{}
	err := s.rows(ctx, func(r row) error {
		var id, why string
		err := r.Scan(&id, &why)
		out[id] = why
		return err
	}, "SELECT id, key_refusal(tenant, id) FROM keys WHERE id = ANY ($1)", ids)
	return out, err
}

// Keys returns a tenant's keys, newest first. If agents is not empty, it returns only keys that are limited to a
// subset of these agents.
func (s *Store) Keys(ctx context.Context, tenant string, agents []string) ([]*spoolv1.Key, error) {
	var list []*spoolv1.Key
	err := s.rows(ctx, func(r row) error {
		var k spoolv1.Key
		var rights events.KeyRights
		var created time.Time
		var revoked, expires *time.Time
		var agents, maker string
		if err := r.Scan(&k.KeyId, &k.Name, &k.Prefix, &created, &revoked, &rights.Role, &agents, &expires, &maker); err != nil {
			return err
		}
		k.Role, k.Agents, k.CreatedBy, k.CreatedAt = string(rights.RoleOf()), splitAgents(agents), optional(maker), wirejson.Time(created)
		if revoked != nil {
			k.RevokedAt = wirejson.Time(*revoked)
		}
		if expires != nil {
			k.ExpiresAt = wirejson.Time(*expires)
		}
		list = append(list, &k)
		return nil
	}, `SELECT id, name, prefix, created_at, revoked_at, role, agents, expires_at, created_by FROM keys
		 WHERE tenant = $1 AND ($2::text[] IS NULL OR agents <> '' AND string_to_array(agents, ',') <@ $2) ORDER BY id DESC`, tenant, agents)
	return list, err
}
