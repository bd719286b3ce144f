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

// tlsHandshakeRecord is the first byte of a TLS connection.
const tlsHandshakeRecord = 22

var (
	// errOtherServerName is returned for a ClientHello with a server name that is not the tunnel's host.
	errOtherServerName = errors.New("the TLS server name is not the host that the tunnel was asked for")
	// errBadHello is returned for a ClientHello that cannot be decoded.
	errBadHello = errors.New("what the tunnel begins with is not a ClientHello of TLS")
)

// checkServerName returns errOtherServerName if a TLS ClientHello names another server than the host of the tunnel.
func checkServerName(hello *tls.ClientHelloInfo, host egress.Host) error {
	if hello.ServerName == "" {
		return nil
	}
	if h, err := egress.ParseHost(hello.ServerName); err != nil || h != host {
		return fmt.Errorf("%w: %s", errOtherServerName, egress.QuotePrefix(hello.ServerName))
	}
	return nil
}

// helloChecker is a reader of the bytes that a sandbox sends through a tunnel. If they begin with a TLS handshake,
// helloChecker reads the whole ClientHello before it returns a byte. It returns an error if the ClientHello names another
// server than the tunnel's host.
type helloChecker struct {
	conn    net.Conn // of the sandbox
	host    egress.Host
	from    io.Reader
	err     error // why the tunnel is refused; valid after the tunnel has ended
	checked bool
}

// newHelloChecker returns a helloChecker for the connection of a sandbox. early are the bytes that were already read from
// conn.
func newHelloChecker(conn net.Conn, early []byte, host egress.Host) *helloChecker {
	return &helloChecker{conn: conn, host: host, from: io.MultiReader(bytes.NewReader(early), conn)}
}

func (h *helloChecker) Read(p []byte) (int, error) {
	if !h.checked {
		h.checked = true
		if err := h.checkHello(); err != nil {
			return 0, err
		}
	}
	return h.from.Read(p)
}

// checkHello reads and checks the ClientHello, if the bytes begin with one. It waits for the first byte without a deadline,
// because in some protocols the server sends first.
func (h *helloChecker) checkHello() error {
	peeked := bufio.NewReader(h.from)
	h.from = peeked
	first, err := peeked.Peek(1)
	if err != nil || first[0] != tlsHandshakeRecord {
		return err
	}
	if err := h.conn.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
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

// readHello reads and decodes the TLS ClientHello at the beginning of a stream.
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

// readOnlyConn is a connection that discards all writes, such as TLS alerts.
type readOnlyConn struct {
	net.Conn
	from io.Reader
}

func (r readOnlyConn) Read(p []byte) (int, error)     { return r.from.Read(p) }
func (readOnlyConn) Write(p []byte) (int, error)      { return len(p), nil }
func (readOnlyConn) SetWriteDeadline(time.Time) error { return nil }
func (readOnlyConn) SetDeadline(time.Time) error      { return nil }
func (readOnlyConn) Close() error                     { return nil }
