// Package tlsconn is TLS with the half-close and the close of a plain socket, for programs that copy between connections of both kinds.
package tlsconn

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"
)

// Conn is a TLS connection whose handshake is complete. It differs from a tls.Conn in two methods:
// CloseWrite waits for a slow peer as long as the write deadline allows, where tls.Conn gives up after 5 s and the peer never reads the
// end; Close does not wait at all, where tls.Conn waits up to 5 s for a peer that does not read.
type Conn struct {
	*tls.Conn
	raw net.Conn
}

// Client runs the client's handshake on raw until ctx ends. When it fails, raw is closed.
func Client(ctx context.Context, raw net.Conn, cfg *tls.Config) (*Conn, error) {
	return handshake(ctx, raw, tls.Client(inner{raw}, cfg))
}

// Server runs the server's handshake on raw until ctx ends. When it fails, raw is closed.
func Server(ctx context.Context, raw net.Conn, cfg *tls.Config) (*Conn, error) {
	return handshake(ctx, raw, tls.Server(inner{raw}, cfg))
}

func handshake(ctx context.Context, raw net.Conn, c *tls.Conn) (*Conn, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		if closeErr := raw.Close(); closeErr != nil && !errors.Is(closeErr, net.ErrClosed) {
			err = errors.Join(err, closeErr)
		}
		return nil, err
	}
	return &Conn{Conn: c, raw: raw}, nil
}

// Close closes the connection at once. What was written is still sent; a peer that has to tell the end from a broken connection
// needs CloseWrite before.
func (c *Conn) Close() error { return c.raw.Close() }

// SetWriteDeadline bounds Write and CloseWrite. After a Write that missed it every later one fails.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }

// inner keeps tls.Conn from replacing the write deadline when it sends close_notify.
type inner struct{ net.Conn }

func (inner) SetWriteDeadline(time.Time) error { return nil }
