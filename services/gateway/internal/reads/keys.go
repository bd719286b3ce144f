package reads

import (
	"context"
	"strings"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/wirejson"
)

// Key is an API key that is accepted.
type Key struct {
	Tenant string
	ID     string
	Role   events.Role
	Agents []string // slugs of the only agents that it may use; empty for all
}

// KeyExpired is why a key that has expired is refused; see key_refusal in the migrations.
const KeyExpired = "expired"

// KeyByHash finds the key with a hash, unless it was revoked or has expired. Postgres compares
// the hashes, since the gateway's role may not read them.
func (s *Store) KeyByHash(ctx context.Context, sha256 string) (Key, bool, error) {
	var k Key
	var rights events.KeyRights
	var agents string
	found, err := s.one(ctx, []any{&k.Tenant, &k.ID, &rights.Role, &agents}, "SELECT tenant, id, role, agents FROM accepted_key($1)", sha256)
	k.Role, k.Agents = rights.RoleOf(), splitAgents(agents)
	return k, found, err
}

// splitAgents reads agents as rows of keys have them.
func splitAgents(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// Now returns the time of Postgres's clock, by which keys expire.
func (s *Store) Now(ctx context.Context) (now time.Time, err error) {
	_, err = s.one(ctx, []any{&now}, "SELECT now()")
	return now, err
}

// KeyRefusals returns for keys why they are not accepted: "" for one that is, revoked, or KeyExpired. An id without a key has no entry.
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

// Keys lists a tenant's keys, the newest first. A viewer that is limited to agents sees the keys that are limited to some of these.
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
		k.Role, k.Agents, k.CreatedBy, k.CreatedAt = string(rights.RoleOf()), splitAgents(agents), filled(maker), wirejson.Time(created)
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
