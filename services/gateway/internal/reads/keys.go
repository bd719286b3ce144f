package reads

import (
	"context"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/wirejson"
)

// Key is an API key that is accepted.
type Key struct {
	Tenant string
	ID     string
}

// KeyByHash finds the key with a hash, unless it was revoked. Postgres compares
// the hashes, since the gateway's role may not read them.
func (s *Store) KeyByHash(ctx context.Context, sha256 string) (Key, bool, error) {
	var k Key
	found, err := s.one(ctx, []any{&k.Tenant, &k.ID}, "SELECT tenant, id FROM accepted_key($1)", sha256)
	return k, found, err
}

// AcceptedKeys gives which of the ids are those of keys that are accepted.
func (s *Store) AcceptedKeys(ctx context.Context, ids []string) (map[string]bool, error) {
	out := map[string]bool{}
	err := s.rows(ctx, func(r row) error {
		var id string
		err := r.Scan(&id)
		out[id] = true
		return err
	}, "SELECT id FROM keys WHERE id = ANY ($1) AND revoked_at IS NULL", ids)
	return out, err
}

// Keys lists a tenant's keys, the newest first.
func (s *Store) Keys(ctx context.Context, tenant string) ([]*spoolv1.Key, error) {
	var list []*spoolv1.Key
	err := s.rows(ctx, func(r row) error {
		var k spoolv1.Key
		var created time.Time
		var revoked *time.Time
		if err := r.Scan(&k.KeyId, &k.Name, &k.Prefix, &created, &revoked); err != nil {
			return err
		}
		k.CreatedAt = wirejson.Time(created)
		if revoked != nil {
			k.RevokedAt = wirejson.Time(*revoked)
		}
		list = append(list, &k)
		return nil
	}, "SELECT id, name, prefix, created_at, revoked_at FROM keys WHERE tenant = $1 ORDER BY id DESC", tenant)
	return list, err
}
