package command

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// expiredFor is the time that must have passed since a key expired before it is revoked to make room for another. Postgres decides
// whether a key is accepted; the margin allows for a difference between its clock and this one.
const expiredFor = 24 * time.Hour

// keyReaders is the number of chains of keys that are read at once.
const keyReaders = 32

// storedKey is the state of an API key in the log. The chain of a key has at most two commits: key_created, then
// key_revoked.
type storedKey struct {
	created events.KeyCreated
	maker   string // id of the key that made it; "" for none
	head    eventlog.Head
	revoked bool
}

func keySubject(tenant, keyID string) events.Subject {
	return events.Subject{Tenant: tenant, ID: events.CatalogueID(events.Key, tenant, "", "", keyID), Aspect: events.Key}
}

// makerOf returns the id of the key that an actor used; "" for the root key and for actors without a key.
func makerOf(a events.Actor) string {
	if a.Kind == "key" && events.CheckID("keyId", events.KindKey, a.ID) == nil {
		return a.ID
	}
	return ""
}

// createKey stores an API key. The actor's key must have all rights of the new key.
//
// The actor's key may be revoked at the same time. createKey appends first and then checks whether the actor's key is
// revoked; a revocation appends first and then looks for keys to revoke. So at least one of the two sees the other.
func (h *Handler) createKey(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.CreateKey
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if len(b.SHA256) != 64 {
		return command.Answer{}, invalid("sha256", "the hash of the key is not a SHA-256 in hex")
	}
	if err := events.CheckID("keyId", events.KindKey, b.KeyID); err != nil {
		return command.Answer{}, invalid("keyId", err.Error())
	}
	maker := makerOf(c.Actor)
	rights, err := h.grantRights(ctx, c.Tenant, maker, b.Rights)
	if err != nil {
		return command.Answer{}, err
	}
	data := events.KeyCreated{KeyID: b.KeyID, Name: b.Name, Prefix: b.Prefix, SHA256: b.SHA256, Rights: rights, CreatedBy: maker}
	key, err := h.storeKey(ctx, c, data)
	if err != nil {
		return command.Answer{}, err
	}
	revoked, err := h.isRevoked(ctx, c.Tenant, maker)
	if err != nil {
		return command.Answer{}, err
	}
	if revoked {
		if err := h.endKey(ctx, c, &key, events.KeyRevoked{KeyID: b.KeyID, Reason: events.KeyRevokedWithMaker, Cause: maker}); err != nil {
			return command.Answer{}, err
		}
		return command.Answer{}, makerRevoked()
	}
	return command.Answer{Position: h.keyPosition(key), Rights: &key.created.Rights}, nil
}

// grantRights returns the rights of a new key. Rights that the request leaves out are those of the maker. It returns
// FORBIDDEN, with the name of the right, if the maker lacks a requested right.
func (h *Handler) grantRights(ctx context.Context, tenant, maker string, asked events.KeyRights) (events.KeyRights, error) {
	own := events.KeyRights{Role: events.RoleAdmin}
	if maker != "" {
		key, err := h.loadKey(ctx, keySubject(tenant, maker))
		if err != nil {
			return own, err
		}
		if key.revoked || key.head.Seq == 0 {
			return own, makerRevoked()
		}
		own = key.created.Rights
	}
	if asked.Role == "" {
		asked.Role = own.EffectiveRole()
	}
	if len(asked.Agents) == 0 {
		asked.Agents = own.Agents
	}
	if asked.ExpiresAt.IsZero() {
		asked.ExpiresAt = own.ExpiresAt
	}
	switch field := asked.FirstExcess(own); {
	case !asked.Role.IsKnown():
		return asked, invalid("role", fmt.Sprintf("there is no role %.32q; there are use, operate and admin", asked.Role))
	case len(asked.Agents) > events.MaxKeyAgents:
		return asked, invalid("agents", fmt.Sprintf("there are %d agents; a key may be limited to %d", len(asked.Agents), events.MaxKeyAgents))
	case field != "":
		return asked, &command.Error{Code: "FORBIDDEN", Field: field, Detail: "a key cannot make a key with more rights than its own: " + describeRights(field, own)}
	}
	asked.Agents = slices.Clone(asked.Agents)
	slices.Sort(asked.Agents)
	asked.Agents = slices.Compact(asked.Agents)
	for _, a := range asked.Agents {
		if (events.Reference{Slug: a}).Check() != nil {
			return asked, invalid("agents", fmt.Sprintf("%.64q is not the slug of an agent", a))
		}
	}
	return asked, nil
}

// describeRights describes the rights of a maker, for an error message.
func describeRights(field string, own events.KeyRights) string {
	switch field {
	case "role":
		return "its role is " + string(own.EffectiveRole())
	case "agents":
		return "it is limited to the agents " + strings.Join(own.Agents, ", ")
	}
	return "it expires at " + own.ExpiresAt.UTC().Format(time.RFC3339)
}

// isRevoked reports whether a key was revoked. For "", which is no key, it returns false.
func (h *Handler) isRevoked(ctx context.Context, tenant, keyID string) (bool, error) {
	if keyID == "" {
		return false, nil
	}
	key, err := h.loadKey(ctx, keySubject(tenant, keyID))
	return key.revoked, err
}

// makerRevoked returns the refusal for a key whose maker, the actor's key, was revoked meanwhile.
func makerRevoked() error {
	return &command.Error{Code: "UNAUTHENTICATED", Field: "Authorization", Detail: "the API key was revoked; no key was made"}
}

// storeKey appends key_created, unless the key is stored already or the tenant has as many keys as it may.
func (h *Handler) storeKey(ctx context.Context, c command.Command, data events.KeyCreated) (storedKey, error) {
	// Commands of one tenant are counted one after the other. Each further copy of the service may exceed the limit by one key.
	lock := &h.keyLocks[events.Partition(c.Tenant)]
	lock.Lock()
	defer lock.Unlock()
	var key storedKey
	err := eventlog.RetryOnConflict(func() (err error) {
		if key, err = h.loadKey(ctx, keySubject(c.Tenant, data.KeyID)); err != nil || key.head.Seq != 0 {
			return err
		}
		if err := h.roomForKey(ctx, c); err != nil {
			return err
		}
		key.created = data
		return h.appendKey(ctx, c, c.ID, &key, data)
	})
	if err != nil {
		return key, fmt.Errorf("store key %s: %w", data.KeyID, err)
	}
	return key, nil
}

// roomForKey refuses with TOO_MANY_KEYS when the tenant has as many keys as it may. Before that it revokes keys that expired a day ago or earlier.
func (h *Handler) roomForKey(ctx context.Context, c command.Command) error {
	limit := h.cfg.MaxKeys(c.Tenant)
	live, err := h.cfg.LiveKeys(ctx, c.Tenant)
	if err != nil {
		return err
	}
	left := len(live)
	for _, subject := range live {
		if left < limit {
			return nil
		}
		key, err := h.loadKey(ctx, subject)
		if err != nil {
			return err
		}
		expires := key.created.Rights.ExpiresAt
		if key.revoked || expires.IsZero() || h.cfg.Now().Before(expires.Add(expiredFor)) {
			continue
		}
		if err := h.endKey(ctx, c, &key, events.KeyRevoked{KeyID: key.created.KeyID, Reason: events.KeyRevokedExpired}); err != nil {
			return err
		}
		left--
	}
	if left < limit {
		return nil
	}
	return &command.Error{Code: "TOO_MANY_KEYS", Detail: fmt.Sprintf("the tenant has %d keys that are not revoked, and may have %d: revoke some", left, limit)}
}

// revokeKey revokes an API key and all keys that it made, and that these made. It may be repeated.
func (h *Handler) revokeKey(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RevokeKey
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := events.CheckID("keyId", events.KindKey, b.KeyID); err != nil {
		return command.Answer{}, invalid("keyId", err.Error())
	}
	key, err := h.loadKey(ctx, keySubject(c.Tenant, b.KeyID))
	if err != nil {
		return command.Answer{}, err
	}
	if key.head.Seq == 0 || (events.KeyRights{Agents: key.created.Rights.Agents}).FirstExcess(events.KeyRights{Agents: c.Agents}) != "" {
		return command.Answer{}, &command.Error{Code: "KEY_NOT_FOUND", Field: "keyId", Detail: "there is no such key"}
	}
	if err := h.endKey(ctx, c, &key, events.KeyRevoked{KeyID: b.KeyID}); err != nil {
		return command.Answer{}, err
	}
	answer := command.Answer{Position: h.keyPosition(key)}
	for look := newFamily(h, c.Tenant, b.KeyID); ; {
		// A key of the list may have made another key before it was revoked, so repeat until no key is found.
		list, err := look.descendants(ctx)
		if err != nil || len(list) == 0 {
			return answer, err
		}
		for _, made := range list {
			if err := h.endKey(ctx, c, &made, events.KeyRevoked{KeyID: made.created.KeyID, Reason: events.KeyRevokedWithMaker, Cause: b.KeyID}); err != nil {
				return answer, err
			}
			answer.Revoked = append(answer.Revoked, command.RevokedKey{KeyID: made.created.KeyID, Position: h.keyPosition(made)})
		}
	}
}

// keyFamily finds the keys that descend from one key. Makers never change, so each chain is read once.
type keyFamily struct {
	h        *Handler
	tenant   string
	ancestor string
	makers   map[string]string       // by key, "" for none
	others   map[events.Subject]bool // chains of keys that do not descend from the ancestor
}

func newFamily(h *Handler, tenant, ancestor string) *keyFamily {
	return &keyFamily{h, tenant, ancestor, map[string]string{}, map[events.Subject]bool{}}
}

// descendants returns the keys that are not revoked and that the ancestor made, directly or through other keys.
func (f *keyFamily) descendants(ctx context.Context) ([]storedKey, error) {
	live, err := f.h.cfg.LiveKeys(ctx, f.tenant)
	if err != nil {
		return nil, err
	}
	live = slices.DeleteFunc(live, func(s events.Subject) bool { return f.others[s] })
	keys := make([]storedKey, len(live))
	group, reading := errgroup.WithContext(ctx)
	group.SetLimit(keyReaders)
	for i, subject := range live {
		group.Go(func() (err error) {
			keys[i], err = f.h.loadKey(reading, subject)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for _, key := range keys {
		f.makers[key.created.KeyID] = key.maker
	}
	var list []storedKey
	for _, key := range keys {
		found, err := f.descends(ctx, key.maker)
		switch {
		case err != nil:
			return nil, err
		case !found:
			f.others[key.head.Subject] = true
		case !key.revoked:
			list = append(list, key)
		}
	}
	return list, nil
}

// descends reports whether a key is the ancestor, or was made by the ancestor or by one of its descendants.
func (f *keyFamily) descends(ctx context.Context, key string) (bool, error) {
	for seen := map[string]bool{}; key != "" && !seen[key]; key = f.makers[key] {
		if key == f.ancestor {
			return true, nil
		}
		seen[key] = true
		if _, read := f.makers[key]; !read {
			stored, err := f.h.loadKey(ctx, keySubject(f.tenant, key))
			if err != nil {
				return false, err
			}
			f.makers[key] = stored.maker
		}
	}
	return false, nil
}

// loadKey reads the chain of a key from the stream's leader. head.Seq is 0 if the key does not exist.
func (h *Handler) loadKey(ctx context.Context, subject events.Subject) (storedKey, error) {
	log := h.cfg.Sessions.Log
	head, err := log.Last(ctx, subject, eventlog.LeaderOnly)
	if err != nil || head.Seq == 0 {
		return storedKey{head: head}, err
	}
	key := storedKey{head: head}
	list, err := head.Commit.DecodeEvents()
	if err != nil {
		return key, err
	}
	if key.revoked = keyCreatedIn(list, head.Commit.Actor, &key) == nil; !key.revoked {
		return key, nil
	}
	for rec, err := range log.Read(ctx, eventlog.Position{Shard: subject.Partition() % log.Shards()}, eventlog.Filter{Subject: subject}) {
		if err != nil {
			return key, err
		}
		if keyCreatedIn(rec.Events, rec.Commit.Actor, &key) != nil {
			return key, nil
		}
	}
	return key, fmt.Errorf("key on %s is revoked and was never created", subject)
}

// keyCreatedIn returns the key_created event of a commit, or nil if there is none, and copies its fields into key.
func keyCreatedIn(list []events.Event, actor events.Actor, key *storedKey) *events.KeyCreated {
	for _, e := range list {
		if created, ok := e.Data.(events.KeyCreated); ok {
			key.created, key.maker = created, created.CreatedBy
			if key.maker == "" { // earlier builds did not record the maker: it is the actor
				key.maker = makerOf(actor)
			}
			return &created
		}
	}
	return nil
}

// endKey appends key_revoked to a stored key, unless the key is revoked already.
func (h *Handler) endKey(ctx context.Context, c command.Command, key *storedKey, data events.KeyRevoked) error {
	subject := key.head.Subject
	first := true
	err := eventlog.RetryOnConflict(func() (err error) {
		if !first {
			if *key, err = h.loadKey(ctx, subject); err != nil {
				return err
			}
		}
		first = false
		if key.revoked {
			return nil
		}
		err = h.appendKey(ctx, c, events.DeriveID(events.KindCommand, c.ID, data.KeyID), key, data)
		key.revoked = err == nil
		return err
	})
	if err != nil {
		return fmt.Errorf("revoke key %s: %w", data.KeyID, err)
	}
	return nil
}

// appendKey appends one event to the chain of a key, and moves its head. The ids of commit and event derive from id.
func (h *Handler) appendKey(ctx context.Context, c command.Command, id string, key *storedKey, data events.Payload) error {
	m := events.NewEventList(events.CommandMeta{CommandID: id, Now: h.cfg.Now()})
	m.Add("", data)
	head, err := h.cfg.Sessions.Log.Append(ctx, key.head, events.Draft{ID: events.DeriveID(events.KindCommit, id), Actor: c.Actor, Events: m.Events()})
	if err == nil {
		key.head = head
	}
	return err
}

func (h *Handler) keyPosition(key storedKey) string {
	return eventlog.Position{Shard: key.head.Subject.Partition() % h.cfg.Sessions.Log.Shards(), Seq: key.head.Seq}.String()
}
