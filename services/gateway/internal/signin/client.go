package signin

import (
	"context"
	"time"
)

// Client describes the client of a request about sign-in, beyond the message of the request.
type Client struct {
	Address string // IP address; "" if unknown
	Key     string // API key in the header Authorization; "" for none
	Cookie  string // value of the session cookie; "" for none
	// Cookies accesses the session cookie of the client. It is nil over gRPC, which has no cookies.
	Cookies Cookies
}

// Cookies accesses the session cookie of an HTTP client.
type Cookies interface {
	// CheckOrigin returns ORIGIN_REFUSED unless the page that sends the request may have a session cookie.
	CheckOrigin() error
	// SetCookie sends a session cookie to the client.
	SetCookie(value string, until time.Time)
	// ClearCookie removes the session cookie from the client.
	ClearCookie()
}

// clientKey is the key under which a context holds the Client of its request.
type clientKey struct{}

// WithClient returns a context that carries the client of a request.
func WithClient(ctx context.Context, c Client) context.Context {
	return context.WithValue(ctx, clientKey{}, c)
}

// ClientFrom returns the client that WithClient stored, or the zero Client.
func ClientFrom(ctx context.Context) Client {
	c, _ := ctx.Value(clientKey{}).(Client)
	return c
}
