package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
)

// handshakeRecord is the first byte of a TLS connection: the type of a handshake record.
const handshakeRecord = 22

var (
	// errOtherName is returned for a ClientHello with a server name that is not the tunnel's host.
	errOtherName = errors.New("the TLS server name is not the host that the tunnel was asked for")
	// errBadHello is returned for a ClientHello that cannot be decoded.
	errBadHello = errors.New("what the tunnel begins with is not a ClientHello of TLS")
)

// checkServerName returns errOtherName if a ClientHello names another server than the tunnel's host.
func checkServerName(hello *tls.ClientHelloInfo, host egress.Host) error {
	if hello.ServerName == "" {
		return nil
	}
	if h, err := egress.ParseHost(hello.ServerName); err != nil || h != host {
		return fmt.Errorf("%w: %s", errOtherName, egress.QuotePrefix(hello.ServerName))
	}
	return nil
}

// helloChecker is a reader of what a sandbox sends through a tunnel. If that begins with a TLS handshake, helloChecker
// reads the whole ClientHello first. It returns an error and no byte if the ClientHello names another server than the
// tunnel's host.
type helloChecker struct {
	conn    net.Conn // of the sandbox
	host    egress.Host
	from    io.Reader
	err     error // why the tunnel is refused; valid after the tunnel has ended
	checked bool
}

// newHelloChecker returns a helloChecker for the sandbox's connection. early has the bytes that were read from it already.
func newHelloChecker(conn net.Conn, early []byte, host egress.Host) *helloChecker {
	return &helloChecker{conn: conn, host: host, from: io.MultiReader(bytes.NewReader(early), conn)}
}

func (h *helloChecker) Read(p []byte) (int, error) {
	if !h.checked {
		h.checked = true
		if err := h.check(); err != nil {
			return 0, err
		}
	}
	return h.from.Read(p)
}

// check checks the ClientHello. It waits for the first byte without a deadline: in some protocols the server sends first.
func (h *helloChecker) check() error {
	peeked := bufio.NewReader(h.from)
	h.from = peeked
	first, err := peeked.Peek(1)
	if err != nil || first[0] != handshakeRecord {
		return err
	}
	if err := h.conn.SetReadDeadline(time.Now().Add(handshakeWithin)); err != nil {
		return err
	}
	var read bytes.Buffer
	hello, err := readHello(io.TeeReader(peeked, &read))
	if err == nil && h.host.Name != "" { // an address has no name to compare
		err = checkServerName(hello, h.host)
	}
	if err != nil {
		h.err = err
		return err
	}
	h.from = io.MultiReader(&read, peeked)
	return h.conn.SetReadDeadline(time.Time{})
}

// readHello returns the ClientHello at the beginning of a stream.
func readHello(from io.Reader) (hello *tls.ClientHelloInfo, err error) {
	errEnough := errors.New("the ClientHello is read")
	c := tls.Server(readOnlyConn{from: from}, &tls.Config{
		MinVersion: tls.VersionTLS10, //nolint:gosec // the handshake ends before anything is negotiated
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = info
			return nil, errEnough
		},
	})
	if err := c.HandshakeContext(context.Background()); !errors.Is(err, errEnough) {
		return nil, fmt.Errorf("%w: %w", errBadHello, err)
	}
	return hello, nil
}

// readOnlyConn is a connection that discards writes, such as TLS alerts.
type readOnlyConn struct {
	net.Conn
	from io.Reader
}

func (r readOnlyConn) Read(p []byte) (int, error)     { return r.from.Read(p) }
func (readOnlyConn) Write(p []byte) (int, error)      { return len(p), nil }
func (readOnlyConn) SetWriteDeadline(time.Time) error { return nil }
func (readOnlyConn) SetDeadline(time.Time) error      { return nil }
func (readOnlyConn) Close() error                     { return nil }
