package socket

import (
	"context"
	"errors"
	"fmt"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// joinChanges starts a goroutine that sends the changes of the tenant's sessions.
func (c *conn) joinChanges(ctx context.Context, r clientRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.joined[""] != nil {
		return problem.New(problem.AlreadyJoined, "", "this connection has joined the changes of sessions already; leave them first")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c.joined[""] = cancel
	c.work.Go(func() {
		defer cancel(nil)
		reader, err := c.handler.cfg.Changes.Join(ctx, c.principal.Tenant, c.principal.Agents, "cursor", r.Cursor)
		if err != nil {
			c.removeJoin("")
			_ = c.sendMessage(errorMessage(problem.From(err), r)) // the client may be gone
			return
		}
		defer reader.Close()
		err = c.sendChanges(ctx, r, reader)
		c.removeJoin("")
		c.sendChangesEnd(r, reader.Cursor(), err)
	})
	return nil
}

// sendChanges sends the changes that the reader returns until an error occurs.
func (c *conn) sendChanges(ctx context.Context, r clientRequest, reader *changes.Reader) error {
	if err := c.sendMessage(serverMessage{Type: typeJoinedSessions, RequestID: r.RequestID, Cursor: reader.Cursor()}.encode()); err != nil {
		return err
	}
	for {
		list, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		for _, change := range list {
			m := serverMessage{Type: typeChanged, Cursor: change.Cursor.String(), Session: change.JSON}
			if change.Deleted != nil {
				m.Type, m.Session, m.Deleted = typeDeleted, nil, change.JSON
			}
			b := m.encode()
			if err := c.sendMessage(b); err != nil {
				return err
			}
			c.handler.cfg.Sent(len(b))
		}
	}
}

// sendChangesEnd notifies the client that the changes of sessions have ended, if the connection is still open.
func (c *conn) sendChangesEnd(r clientRequest, cursor string, err error) {
	left := serverMessage{Type: typeLeftSessions, Cursor: cursor}
	var wish errLeftByClient
	var p *problem.Error
	switch {
	case errors.As(err, &wish):
		left.RequestID = wish.request.RequestID
		_ = c.sendMessage(left.encode())
	case errors.Is(err, errSlowClient):
		slow := problem.New(problem.SlowClient, "", fmt.Sprintf("the client took too long to read; join again with cursor %s", cursor))
		c.closeWithError(websocket.StatusPolicyViolation, slow, clientRequest{})
	case errors.As(err, &p):
		if p.Code == problem.Unauthenticated {
			return // the whole connection is closed with this error
		}
		c.handler.cfg.Cut(string(p.Code))
		if c.sendMessage(errorMessage(p, r)) == nil {
			_ = c.sendMessage(left.encode())
		}
	case errors.Is(err, errConnectionClosed):
	default:
		_ = c.ws.CloseNow() // the connection is broken
	}
}
