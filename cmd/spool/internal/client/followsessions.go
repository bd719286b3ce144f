package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/coder/websocket"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/retry"
)

// SessionChange is a change of the tenant's sessions, as FollowSessions yields it.
type SessionChange struct {
	Type    string                              `json:"type"`              // sessions:joined, sessions:changed or sessions:deleted
	Cursor  string                              `json:"cursor"`            // with which FollowSessions continues after this change
	Session *APIObject[*spoolv1.Session]        `json:"session,omitempty"` // the session after a change
	Deleted *APIObject[*spoolv1.DeletedSession] `json:"deleted,omitempty"`
}

// FollowSessions yields the changes of the tenant's sessions after a cursor, "" for those from now on, until ctx ends. It reconnects after a lost
// connection, and yields each change exactly once. It ends with an error: that of ctx, an *Error, or an *UnreachableError if the server did not respond
// within Config.GiveUp.
func (c *Client) FollowSessions(ctx context.Context, cursor string) iter.Seq2[SessionChange, error] {
	return func(yield func(SessionChange, error) bool) {
		since, pauses, began := time.Now(), retry.NewDoubling(firstRetryWait, maxRetryWait), cursor != ""
		for {
			err := c.readChanges(ctx, cursor, func(m SessionChange) bool {
				since, cursor = time.Now(), m.Cursor
				pauses.Reset()
				if m.Type == "sessions:joined" && began {
					return true
				}
				began = true
				return yield(m, nil)
			})
			var problem *Error
			switch refused := errors.As(err, &problem); {
			case errors.Is(err, errIterationStopped):
				return
			case ctx.Err() != nil:
				err = ctx.Err()
			case refused && problem.isTemporary() && time.Since(since) <= c.cfg.GiveUp, !refused && time.Since(since) <= c.cfg.GiveUp:
				if retry.Pause(ctx, pauses.NextBackOff()) == nil {
					continue
				}
				err = ctx.Err()
			case !refused:
				err = c.unreachableError(ctx, err)
			}
			yield(SessionChange{}, err)
			return
		}
	}
}

// readChanges joins the changes of sessions on one connection, and yields them until the connection ends.
func (c *Client) readChanges(ctx context.Context, cursor string, yield func(SessionChange) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := c.dialWebSocket(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseNow() }() // the connection is no longer used
	conn.SetReadLimit(maxResponseBytes)
	join, err := encodeJSON(map[string]any{"type": "sessions:join", "requestId": "1", "cursor": cursor})
	if err != nil {
		return err
	}
	if err := conn.Write(ctx, websocket.MessageText, join); err != nil {
		return err
	}
	timeout := time.AfterFunc(joinTimeout, cancel)
	defer timeout.Stop()
	pinged := make(chan struct{})
	go func() { defer close(pinged); keepAlive(ctx, conn) }()
	defer func() { cancel(); <-pinged }()
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			return closeReason(err)
		}
		timeout.Stop()
		var head serverMessage
		if err := json.Unmarshal(data, &head); err != nil {
			return fmt.Errorf("decode a message: %w", err)
		}
		switch head.Type {
		case "error":
			return &Error{Code: head.Code, Field: head.Field, Detail: head.Message}
		case "sessions:left":
			return errors.New("the server ended the stream")
		}
		var m SessionChange
		if err := json.Unmarshal(data, &m); err != nil {
			return fmt.Errorf("decode a change: %w", err)
		}
		if !yield(m) {
			return errIterationStopped
		}
	}
}
