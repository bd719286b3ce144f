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

// minTimeSinceExpiry is the time since the expiry of an API key after which the key may be revoked to make room for
// another. Postgres decides whether a key is accepted; the margin allows for a difference between its clock and this
// one.
const minTimeSinceExpiry = 24 * time.Hour

// maxConcurrentKeyReads is the maximum number of API keys whose events are read from the log at the same time.
const maxConcurrentKeyReads = 32

// storedKey is the state of an API key in the log. The subject of a key has at most two commits: key_created, then
// key_revoked.
type storedKey struct {
	created events.KeyCreated
	maker   string // id of the key that made it; "" for none
	head    eventlog.Head
	revoked bool
}

// keySubject returns the subject of an API key's events in the log.
func keySubject(tenant, keyID string) events.Subject {
	return events.Subject{Tenant: tenant, ID: events.CatalogueID(events.Key, tenant, "", "", keyID), Aspect: events.Key}
}

// actorKeyID returns the id of the API key that an actor used, or "" for the root key and for an actor without a key.
func actorKeyID(a events.Actor) string {
	if a.Kind == "key" && events.CheckID("keyId", events.KindKey, a.ID) == nil {
		return a.ID
	}
	return ""
}

// createKey carries out a command that creates an API key. The actor's key, the maker of the new key, must have all
// rights of the new key.
//
// The maker may be revoked at the same time. createKey appends first and then checks whether the maker is revoked; a
// revocation appends first and then looks for keys that the revoked key made. So at least one of the two detects the
// other.
func (h *Handler) createKey(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.CreateKey
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if len(b.SHA256) != 64 {
		return command.Answer{}, invalidFieldError("sha256", "the hash of the key is not a SHA-256 in hex")
	}
	if err := events.CheckID("keyId", events.KindKey, b.KeyID); err != nil {
		return command.Answer{}, invalidFieldError("keyId", err.Error())
	}
	maker := actorKeyID(c.Actor)
	rights, err := h.newKeyRights(ctx, c.Tenant, maker, b.Rights)
	if err != nil {
		return command.Answer{}, err
	}
	data := events.KeyCreated{KeyID: b.KeyID, Name: b.Name, Prefix: b.Prefix, SHA256: b.SHA256, Rights: rights, CreatedBy: maker}
	key, err := h.storeKey(ctx, c, data)
	if err != nil {
		return command.Answer{}, err
	}
	revoked, err := h.isKeyRevoked(ctx, c.Tenant, maker)
	if err != nil {
		return command.Answer{}, err
	}
	if revoked {
		if err := h.appendRevocation(ctx, c, &key, events.KeyRevoked{KeyID: b.KeyID, Reason: events.KeyRevokedWithMaker, Cause: maker}); err != nil {
			return command.Answer{}, err
		}
		return command.Answer{}, makerRevokedError()
	}
	return command.Answer{Position: h.keyPosition(key), Rights: &key.created.Rights}, nil
}

// newKeyRights returns the rights of a new API key. Rights that the request leaves out are those of the key maker, with
// which the new key is created. If the maker lacks a requested right, it returns the refusal FORBIDDEN with the name of
// the right.
func (h *Handler) newKeyRights(ctx context.Context, tenant, maker string, asked events.KeyRights) (events.KeyRights, error) {
	own := events.KeyRights{Role: events.RoleAdmin}
	if maker != "" {
		key, err := h.loadKey(ctx, keySubject(tenant, maker))
		if err != nil {
			return own, err
		}
		if key.revoked || key.head.Seq == 0 {
			return own, makerRevokedError()
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
		return asked, invalidFieldError("role", fmt.Sprintf("there is no role %.32q; there are use, operate and admin", asked.Role))
	case len(asked.Agents) > events.MaxKeyAgents:
		return asked, invalidFieldError("agents", fmt.Sprintf("there are %d agents; a key may be limited to %d", len(asked.Agents), events.MaxKeyAgents))
	case field != "":
		return asked, &command.Error{Code: "FORBIDDEN", Field: field, Detail: "a key cannot make a key with more rights than its own: " + describeRights(field, own)}
	}
	asked.Agents = slices.Clone(asked.Agents)
	slices.Sort(asked.Agents)
	asked.Agents = slices.Compact(asked.Agents)
	for _, a := range asked.Agents {
		if (events.Reference{Slug: a}).Check() != nil {
			return asked, invalidFieldError("agents", fmt.Sprintf("%.64q is not the slug of an agent", a))
		}
	}
	return asked, nil
}

// describeRights describes the rights of the API key with which a new key is created, for an error message.
func describeRights(field string, own events.KeyRights) string {
	switch field {
	case "role":
		return "its role is " + string(own.EffectiveRole())
	case "agents":
		return "it is limited to the agents " + strings.Join(own.Agents, ", ")
	}
	return "it expires at " + own.ExpiresAt.UTC().Format(time.RFC3339)
}

// isKeyRevoked reports whether an API key was revoked. It returns false if keyID is "".
func (h *Handler) isKeyRevoked(ctx context.Context, tenant, keyID string) (bool, error) {
	if keyID == "" {
		return false, nil
	}
	key, err := h.loadKey(ctx, keySubject(tenant, keyID))
	return key.revoked, err
}

// makerRevokedError returns the refusal of a new API key because the key with which it was created was revoked
// meanwhile.
func makerRevokedError() error {
	return &command.Error{Code: "UNAUTHENTICATED", Field: "Authorization", Detail: "the API key was revoked; no key was made"}
}

// storeKey appends key_created for a new API key, unless the key is stored already. It returns a refusal if the tenant
// has the maximum number of keys.
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
		if err := h.makeRoomForKey(ctx, c); err != nil {
			return err
		}
		key.created = data
		return h.appendKeyEvent(ctx, c, c.ID, &key, data)
	})
	if err != nil {
		return key, fmt.Errorf("store key %s: %w", data.KeyID, err)
	}
	return key, nil
}

// makeRoomForKey revokes API keys that expired a day ago or earlier until the tenant has fewer keys than the maximum.
// If too few have expired, it returns the refusal TOO_MANY_KEYS.
func (h *Handler) makeRoomForKey(ctx context.Context, c command.Command) error {
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
		if key.revoked || expires.IsZero() || h.cfg.Now().Before(expires.Add(minTimeSinceExpiry)) {
			continue
		}
		if err := h.appendRevocation(ctx, c, &key, events.KeyRevoked{KeyID: key.created.KeyID, Reason: events.KeyRevokedExpired}); err != nil {
			return err
		}
		left--
	}
	if left < limit {
		return nil
	}
	return &command.Error{Code: "TOO_MANY_KEYS", Detail: fmt.Sprintf("the tenant has %d keys that are not revoked, and may have %d: revoke some", left, limit)}
}

// revokeKey carries out a command that revokes an API key, and all keys that were created with it, directly or through
// other keys. The command may be repeated.
func (h *Handler) revokeKey(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RevokeKey
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := events.CheckID("keyId", events.KindKey, b.KeyID); err != nil {
		return command.Answer{}, invalidFieldError("keyId", err.Error())
	}
	key, err := h.loadKey(ctx, keySubject(c.Tenant, b.KeyID))
	if err != nil {
		return command.Answer{}, err
	}
	if key.head.Seq == 0 || (events.KeyRights{Agents: key.created.Rights.Agents}).FirstExcess(events.KeyRights{Agents: c.Agents}) != "" {
		return command.Answer{}, &command.Error{Code: "KEY_NOT_FOUND", Field: "keyId", Detail: "there is no such key"}
	}
	if err := h.appendRevocation(ctx, c, &key, events.KeyRevoked{KeyID: b.KeyID}); err != nil {
		return command.Answer{}, err
	}
	answer := command.Answer{Position: h.keyPosition(key)}
	for look := newKeyFamily(h, c.Tenant, b.KeyID); ; {
		// A key of the list may have made another key before it was revoked, so repeat until no key is found.
		list, err := look.descendants(ctx)
		if err != nil || len(list) == 0 {
			return answer, err
		}
		for _, made := range list {
			if err := h.appendRevocation(ctx, c, &made, events.KeyRevoked{KeyID: made.created.KeyID, Reason: events.KeyRevokedWithMaker, Cause: b.KeyID}); err != nil {
				return answer, err
			}
			answer.Revoked = append(answer.Revoked, command.RevokedKey{KeyID: made.created.KeyID, Position: h.keyPosition(made)})
		}
	}
}

// keyFamily finds the API keys that were created with one key, its ancestor, directly or through other keys. It reads
// the events of each key once, because the key with which a key was created never changes.
type keyFamily struct {
	h        *Handler
	tenant   string
	ancestor string
	makers   map[string]string       // key with which each key was created, by key id; "" for none
	others   map[events.Subject]bool // subjects of keys that do not descend from the ancestor
}

// newKeyFamily returns the keyFamily of the API key ancestor.
func newKeyFamily(h *Handler, tenant, ancestor string) *keyFamily {
	return &keyFamily{h, tenant, ancestor, map[string]string{}, map[events.Subject]bool{}}
}

// descendants returns the API keys that are not revoked and that were created with the ancestor, directly or through
// other keys.
func (f *keyFamily) descendants(ctx context.Context) ([]storedKey, error) {
	live, err := f.h.cfg.LiveKeys(ctx, f.tenant)
	if err != nil {
		return nil, err
	}
	live = slices.DeleteFunc(live, func(s events.Subject) bool { return f.others[s] })
	keys := make([]storedKey, len(live))
	group, reading := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrentKeyReads)
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
		found, err := f.isAncestorOrDescendant(ctx, key.maker)
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

// isAncestorOrDescendant reports whether an API key is the ancestor, or was created with the ancestor or with a
// descendant of it.
func (f *keyFamily) isAncestorOrDescendant(ctx context.Context, key string) (bool, error) {
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

// loadKey reads the events of an API key from the stream's leader. If the key does not exist, head.Seq of the result is
// 0.
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
	if key.revoked = findKeyCreated(list, head.Commit.Actor, &key) == nil; !key.revoked {
		return key, nil
	}
	for rec, err := range log.Read(ctx, eventlog.Position{Shard: subject.Partition() % log.Shards()}, eventlog.Filter{Subject: subject}) {
		if err != nil {
			return key, err
		}
		if findKeyCreated(rec.Events, rec.Commit.Actor, &key) != nil {
			return key, nil
		}
	}
	return key, fmt.Errorf("key on %s is revoked and was never created", subject)
}

// findKeyCreated returns the key_created event among the events of a commit, and copies its fields and the actor's key
// into key. It returns nil if there is none.
func findKeyCreated(list []events.Event, actor events.Actor, key *storedKey) *events.KeyCreated {
	for _, e := range list {
		if created, ok := e.Data.(events.KeyCreated); ok {
			key.created, key.maker = created, created.CreatedBy
			if key.maker == "" { // earlier builds did not record the maker: it is the actor
				key.maker = actorKeyID(actor)
			}
			return &created
		}
	}
	return nil
}

// appendRevocation appends key_revoked to the events of a stored API key, unless the key is revoked already.
func (h *Handler) appendRevocation(ctx context.Context, c command.Command, key *storedKey, data events.KeyRevoked) error {
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
		err = h.appendKeyEvent(ctx, c, events.DeriveID(events.KindCommand, c.ID, data.KeyID), key, data)
		key.revoked = err == nil
		return err
	})
	if err != nil {
		return fmt.Errorf("revoke key %s: %w", data.KeyID, err)
	}
	return nil
}

// appendKeyEvent appends one event to the subject of an API key, and updates key.head. The ids of the commit and the
// event derive from id.
func (h *Handler) appendKeyEvent(ctx context.Context, c command.Command, id string, key *storedKey, data events.Payload) error {
	m := events.NewEventList(events.CommandMeta{CommandID: id, Now: h.cfg.Now()})
	m.Add("", data)
	head, err := h.cfg.Sessions.Log.Append(ctx, key.head, events.Draft{ID: events.DeriveID(events.KindCommit, id), Actor: c.Actor, Events: m.Events()})
	if err == nil {
		key.head = head
	}
	return err
}

// keyPosition returns the position of the last commit of an API key.
func (h *Handler) keyPosition(key storedKey) string {
	return eventlog.Position{Shard: key.head.Subject.Partition() % h.cfg.Sessions.Log.Shards(), Seq: key.head.Seq}.String()
}
