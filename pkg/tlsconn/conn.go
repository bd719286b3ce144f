// Package tlsconn implements TLS connections with the half-close and close of a plain TCP socket, for programs that
// copy between TLS and plain connections.
package tlsconn

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"
)

// Conn is a TLS connection whose handshake is complete. Two methods differ from tls.Conn. CloseWrite waits for a slow
// peer until the write deadline; tls.Conn gives up after 5 s, and the peer never reads the end. Close does not wait;
// tls.Conn waits up to 5 s for a peer that does not read.
type Conn struct {
	*tls.Conn
	raw net.Conn
}

// Client performs the client's handshake on raw. ctx bounds the handshake. If the handshake fails, raw is closed.
func Client(ctx context.Context, raw net.Conn, cfg *tls.Config) (*Conn, error) {
	return handshake(ctx, raw, tls.Client(deadlineConn{raw}, cfg))
}

// Server performs the server's handshake on raw. ctx bounds the handshake. If the handshake fails, raw is closed.
func Server(ctx context.Context, raw net.Conn, cfg *tls.Config) (*Conn, error) {
	return handshake(ctx, raw, tls.Server(deadlineConn{raw}, cfg))
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

// Close closes the connection immediately. Data that was written is still sent. A peer that must distinguish the end
// from a broken connection needs CloseWrite first.
func (c *Conn) Close() error { return c.raw.Close() }

// SetWriteDeadline bounds Write and CloseWrite. After a Write that missed the deadline, all later ones fail.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }

// deadlineConn is a connection whose write deadline tls.Conn cannot replace when it sends close_notify.
type deadlineConn struct{ net.Conn }

func (deadlineConn) SetWriteDeadline(time.Time) error { return nil }
