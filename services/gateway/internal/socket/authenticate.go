package socket

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// authenticateTimeout is the longest time in which the first message of an unauthenticated connection must arrive.
const authenticateTimeout = 10 * time.Second

// authenticate reads the first message of the connection, which has the key, and sets the principal. It returns the function
// that ends the stream of the principal's tenant. ok is false if the connection was closed instead.
func (c *conn) authenticate(authenticate func(context.Context, string) (auth.Principal, error)) (end func(), ok bool) {
	timeout := min(authenticateTimeout, c.handler.cfg.ReadTimeout)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	closed := make(chan struct{})
	late := context.AfterFunc(ctx, func() {
		defer close(closed)
		c.closeWithError(websocket.StatusPolicyViolation, problem.New(problem.Unauthenticated, "key", fmt.Sprintf("no message %s has arrived within %s", typeAuthenticate, timeout)), clientRequest{})
	})
	r, err := c.receiveKey()
	if !late() {
		<-closed
		return nil, false
	}
	var refused *problem.Error
	if err != nil && !errors.As(err, &refused) {
		_ = c.ws.CloseNow() // the client is gone
		return nil, false
	}
	if err == nil {
		c.principal, err = authenticate(ctx, r.key)
	}
	if err == nil {
		end, err = c.handler.cfg.Admission.BeginStream(c.principal.Tenant)
	}
	if err != nil {
		p := problem.From(err)
		if p.Code == problem.Internal {
			c.handler.cfg.Logger.Error("authenticate a WebSocket", "error", p)
		}
		c.closeWithError(websocket.StatusPolicyViolation, p, r)
		return nil, false
	}
	if err := c.sendMessage(serverMessage{Type: typeAuthenticated, RequestID: r.RequestID}.encode()); err != nil {
		end()
		_ = c.ws.CloseNow() // the client is gone
		return nil, false
	}
	return end, true
}

// receiveKey reads a message authenticate.
func (c *conn) receiveKey() (clientRequest, error) {
	kind, data, err := c.receiveMessage()
	if err != nil {
		return clientRequest{}, err
	}
	if kind != websocket.MessageText {
		return clientRequest{}, problem.Invalid("", "send text, not binary")
	}
	r, err := parseRequest(data)
	var malformed errMalformedMessage
	switch {
	case errors.As(err, &malformed):
		return r, problem.Invalid("", "%s", malformed.detail)
	case err == nil && r.Type != typeAuthenticate:
		return r, problem.New(problem.Unauthenticated, "type", "the first message must be "+typeAuthenticate)
	}
	return r, err
}
