package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// key creates or revokes an API key. A key's chain holds at most two commits,
// so that the guard alone decides: key_created, then key_revoked.
func (h *Handler) key(ctx context.Context, c command.Command) (command.Answer, error) {
	var keyID string
	var data events.Payload
	var expected int // how many events the chain holds before
	switch c.Type {
	case command.TypeCreateKey:
		var b command.CreateKey
		if err := decode(c, &b); err != nil {
			return command.Answer{}, err
		}
		if len(b.SHA256) != 64 {
			return command.Answer{}, invalid("sha256", "the hash of the key is not a SHA-256 in hex")
		}
		keyID, data = b.KeyID, events.KeyCreated{KeyID: b.KeyID, Name: b.Name, Prefix: b.Prefix, SHA256: b.SHA256}
	default:
		var b command.RevokeKey
		if err := decode(c, &b); err != nil {
			return command.Answer{}, err
		}
		keyID, data, expected = b.KeyID, events.KeyRevoked{KeyID: b.KeyID}, 1
	}
	if err := events.CheckID("keyId", events.KindKey, keyID); err != nil {
		return command.Answer{}, invalid("keyId", err.Error())
	}
	return h.appendKey(ctx, c, keyID, data, expected)
}

func (h *Handler) appendKey(ctx context.Context, c command.Command, keyID string, data events.Payload, expected int) (command.Answer, error) {
	subject := events.Subject{Tenant: c.Tenant, ID: events.CatalogueID(events.Key, c.Tenant, "", "", keyID), Aspect: events.Key}
	for range maxRounds {
		head, err := h.cfg.Sessions.Log.Last(ctx, subject, eventlog.Leader)
		if err != nil {
			return command.Answer{}, err
		}
		have, err := length(head)
		if err != nil {
			return command.Answer{}, err
		}
		at := eventlog.Position{Shard: subject.Partition() % h.cfg.Sessions.Log.Shards(), Seq: head.Seq}
		if have > expected {
			return command.Answer{Position: at.String()}, nil
		}
		if have < expected {
			return command.Answer{}, &command.Error{Code: "KEY_NOT_FOUND", Field: "keyId", Detail: "there is no such key"}
		}
		m := events.NewMint(events.Meta{CommandID: c.ID, Now: h.cfg.Now()})
		m.Add("", data)
		head, err = h.cfg.Sessions.Log.Append(ctx, head, events.Draft{
			ID: events.Derive(events.KindCommit, c.ID), Actor: c.Actor, Events: m.Events(),
		})
		var conflict *eventlog.ConflictError
		if errors.As(err, &conflict) {
			continue
		}
		at.Seq = head.Seq
		return command.Answer{Position: at.String()}, err
	}
	return command.Answer{}, fmt.Errorf("key %s: other writers came first %d times in a row", keyID, maxRounds)
}

// length is how many events a key's chain holds, which its last one tells.
func length(head eventlog.Head) (int, error) {
	if head.Seq == 0 {
		return 0, nil
	}
	list, err := head.Commit.Decode()
	if err != nil {
		return 0, err
	}
	for _, e := range list {
		if _, revoked := e.Data.(events.KeyRevoked); revoked {
			return 2, nil
		}
	}
	return 1, nil
}
