package socket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
)

// readRequests reads and handles the client's messages until the connection ends.
func (c *conn) readRequests(ctx context.Context) {
	for {
		kind, data, err := c.receiveMessage()
		var refused *problem.Error
		if errors.As(err, &refused) {
			c.closeWithError(websocket.StatusTryAgainLater, refused, clientRequest{})
			return
		}
		if err != nil {
			return
		}
		if kind != websocket.MessageText {
			c.closeOnce(websocket.StatusUnsupportedData, "INVALID_REQUEST: send text, not binary")
			return
		}
		r, err := parseRequest(data)
		var malformed errMalformedMessage
		if errors.As(err, &malformed) {
			c.closeWithError(websocket.StatusInvalidFramePayloadData, problem.Invalid("", "%s", malformed.detail), r)
			return
		}
		if err == nil {
			err = c.handleRequest(ctx, r)
		}
		if err != nil && c.sendMessage(errorMessage(problem.From(err), r)) != nil {
			return
		}
	}
}

// receiveMessage reads a message of the client. The bytes of the message count against the gateway's limit while it
// arrives. A client that does not finish a message in time is disconnected.
func (c *conn) receiveMessage() (websocket.MessageType, []byte, error) {
	// A context that ends would close the connection before a close code is sent, so the read has none.
	kind, from, err := c.ws.Reader(context.Background())
	if err != nil {
		return 0, nil, err
	}
	late := time.AfterFunc(c.handler.cfg.ReadTimeout, func() { _ = c.ws.CloseNow() })
	defer late.Stop()
	if err := c.handler.cfg.Admission.CheckRate(c.principal.Tenant); err != nil {
		return 0, nil, err
	}
	held, err := c.handler.cfg.Admission.Begin(c.principal.Tenant)
	if err != nil {
		return 0, nil, err
	}
	defer held.End()
	data, err := io.ReadAll(held.Reader(from))
	return kind, data, err
}

// handleRequest carries out a message of the client.
func (c *conn) handleRequest(ctx context.Context, r clientRequest) error {
	switch r.Type {
	case typeJoin:
		return c.joinSession(ctx, r)
	case typeLeave:
		return c.leaveSession(r)
	case typeJoinSessions:
		return c.joinChanges(ctx, r)
	case typeLeaveSessions:
		return c.leave("", r)
	case typeDecide:
		return c.handleDecision(ctx, r)
	}
	return problem.Invalid("type", "%+q is not a type of message: there are %s, %s, %s, %s and %s", truncate.Text(r.Type, 64), typeJoin, typeLeave, typeJoinSessions, typeLeaveSessions, typeDecide)
}

// errLeftByClient is the cause with which a join is cancelled when its client has sent a message to leave the session.
type errLeftByClient struct{ request clientRequest }

func (errLeftByClient) Error() string { return "the client left the session" }

// leaveSession ends the join of the session that a message session:leave names.
func (c *conn) leaveSession(r clientRequest) error {
	if err := reads.CheckSessionID(r.SessionID); err != nil {
		return err
	}
	return c.leave(r.SessionID, r)
}

// leave ends the join of a session, or of the changes of all sessions ("").
func (c *conn) leave(session string, r clientRequest) error {
	c.mu.Lock()
	cancel := c.joined[session]
	c.mu.Unlock()
	if cancel == nil {
		return problem.New(problem.NotJoined, "", "this connection has not joined it")
	}
	cancel(errLeftByClient{r})
	return nil
}

// joinSession starts a goroutine that streams or replays a session.
func (c *conn) joinSession(ctx context.Context, r clientRequest) error {
	if err := reads.CheckSessionID(r.SessionID); err != nil {
		return err
	}
	ask, err := r.replayRequest()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.joined[r.SessionID] != nil {
		return problem.New(problem.AlreadyJoined, "", "this connection has joined the session already; leave it first")
	}
	if len(c.joined) >= c.handler.cfg.MaxSessions {
		return problem.New(problem.TooManySessions, "", fmt.Sprintf("one connection may join %d sessions; leave some or open another", c.handler.cfg.MaxSessions))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c.joined[r.SessionID] = cancel
	c.work.Go(func() {
		if ask != nil {
			c.sendReplay(ctx, r, *ask)
		} else {
			c.followSession(ctx, r)
		}
		cancel(nil)
	})
	return nil
}

// removeJoin removes a session from the joined ones of the connection. It must be called before the client is
// notified of the end, so that the client may join again.
func (c *conn) removeJoin(session string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.joined, session)
}

// followSession joins a session and sends its new events, until the session ends or the client leaves.
func (c *conn) followSession(ctx context.Context, r clientRequest) {
	reader, err := c.handler.cfg.Live.Join(ctx, c.principal.Tenant, c.principal.Agents, r.SessionID, r.After)
	if err != nil {
		c.removeJoin(r.SessionID)
		c.sendFailedJoin(ctx, r, err)
		return
	}
	defer reader.Close()
	tip, cursor := reader.Tip(), r.After
	err = c.sendMessage(serverMessage{Type: typeJoined, RequestID: r.RequestID, SessionID: r.SessionID, Seq: &tip}.encode())
	if err == nil {
		err = c.sendFrames(ctx, reader, &cursor, r.wantsMetadata())
	}
	c.removeJoin(r.SessionID)
	c.sendJoinEnd(r, cursor, err)
}

// sendReplay sends the events of a replay, until it ends or the client leaves.
func (c *conn) sendReplay(ctx context.Context, r clientRequest, request replay.Request) {
	request.Tenant, request.Agents = c.principal.Tenant, c.principal.Agents
	from, err := c.handler.cfg.Player.Open(ctx, request)
	if err != nil {
		c.removeJoin(r.SessionID)
		c.sendFailedJoin(ctx, r, err)
		return
	}
	defer from.Close()
	tip, cursor := from.Tip(), from.Cursor()
	err = c.sendMessage(serverMessage{Type: typeJoined, RequestID: r.RequestID, SessionID: r.SessionID, Seq: &tip}.encode())
	if err == nil {
		err = c.sendFrames(ctx, from, &cursor, r.wantsMetadata())
	}
	c.removeJoin(r.SessionID)
	c.sendJoinEnd(r, cursor, err)
}

// sendFailedJoin answers a join that failed. If the cursor was not valid, it also sends a snapshot of the blocks.
func (c *conn) sendFailedJoin(ctx context.Context, r clientRequest, err error) {
	var left errLeftByClient
	if errors.As(context.Cause(ctx), &left) {
		_ = c.sendMessage(serverMessage{Type: typeLeft, RequestID: left.request.RequestID, SessionID: r.SessionID}.encode())
		return
	}
	p := problem.From(err)
	if p.Code == problem.Internal {
		c.handler.cfg.Logger.Error("join session", "session", r.SessionID, "error", p)
	}
	if c.sendMessage(errorMessage(p, r)) != nil || r.Replay || p.Code != problem.CursorAhead && p.Code != problem.CursorExpired {
		return
	}
	if err := c.sendSnapshot(ctx, r); err != nil {
		_ = c.sendMessage(errorMessage(problem.From(err), r))
	}
}

// sendSnapshot sends a session's blocks. Their bytes count against the gateway's limit until they are sent.
func (c *conn) sendSnapshot(ctx context.Context, r clientRequest) error {
	held := c.handler.cfg.Admission.BeginStreamData(c.principal.Tenant)
	defer held.End()
	blocks, tip, err := c.handler.cfg.Player.Blocks(ctx, c.principal.Tenant, r.SessionID, "", held.ReserveBytes)
	if err == nil {
		_ = c.sendMessage(snapshotMessage(r, tip, blocks)) // the client may be gone
	}
	return err
}

// frameSource returns, one batch after another, the frames that a join sends. It is a live.Reader or a replay.Replay.
type frameSource interface {
	Next(ctx context.Context) ([]live.Frame, error)
	Session() string
}

// sendFrames sends the frames of a join until an error occurs, which it returns. cursor is set to the seq of the last
// event that was sent.
func (c *conn) sendFrames(ctx context.Context, from frameSource, cursor *uint32, metadata bool) error {
	for {
		frames, err := from.Next(ctx)
		if err != nil {
			return err
		}
		if err := c.sendBatch(from.Session(), frames, cursor, metadata); err != nil {
			return err
		}
	}
}

// sendBatch sends each frame as a message of its own, with few writes to the network. If it returns errSlowClient, cursor
// is the seq of the last event that was sent.
func (c *conn) sendBatch(session string, frames []live.Frame, cursor *uint32, metadata bool) (err error) {
	if len(frames) > 1 {
		c.net.beginBatch()
		defer func() {
			if ended := c.timedWrite(c.net.endBatch); err == nil || ended != nil && !errors.Is(ended, errSlowClient) {
				err = ended
			}
		}()
	}
	for _, f := range frames {
		err = c.sendMessage(frameMessage(session, f, metadata))
		if err != nil && !errors.Is(err, errSlowClient) {
			return err
		}
		if f.JSON != nil {
			*cursor = f.Seq
			c.handler.cfg.Sent(f.Len(metadata))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sendJoinEnd notifies the client that a join has ended, if the connection is still open.
func (c *conn) sendJoinEnd(r clientRequest, cursor uint32, err error) {
	session := r.SessionID
	left := serverMessage{Type: typeLeft, SessionID: session, Seq: &cursor}
	var wish errLeftByClient
	var p *problem.Error
	switch {
	case errors.Is(err, io.EOF): // the replay is complete
		_ = c.sendMessage(left.encode())
	case errors.As(err, &wish):
		left.RequestID = wish.request.RequestID
		_ = c.sendMessage(left.encode())
	case errors.Is(err, errSlowClient):
		again := fmt.Sprintf("after=%d", cursor)
		if r.Replay {
			again = fmt.Sprintf("from=%d", cursor+1)
		}
		slow := problem.New(problem.SlowClient, "", "the client took too long to read; connect again with "+again)
		c.closeWithError(websocket.StatusPolicyViolation, slow, clientRequest{SessionID: session})
	case errors.As(err, &p):
		if p.Code == problem.Unauthenticated {
			return // the whole connection is closed with this error
		}
		c.handler.cfg.Cut(string(p.Code))
		if c.sendMessage(errorMessage(p, clientRequest{SessionID: session})) == nil {
			_ = c.sendMessage(left.encode())
		}
	case errors.Is(err, errConnectionClosed):
	default:
		_ = c.ws.CloseNow() // the connection is broken
	}
}
