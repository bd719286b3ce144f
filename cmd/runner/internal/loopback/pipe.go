package loopback

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// refusedRequestTimeout is the time limit for a client to send the header of a request that is then refused.
	refusedRequestTimeout = 10 * time.Second
	// refusalLingerTime is the maximum time that a connection stays open after a refusal, so that the client can read the answer.
	refusalLingerTime = 2 * time.Second
)

// halfClosableConn is a connection whose write direction can be closed while its read direction stays open.
type halfClosableConn interface {
	net.Conn
	CloseWrite() error
}

// proxyPipe copies bytes in both directions between a client and the egress proxy. Each direction ends when its source ends; an error ends both.
type proxyPipe struct {
	client, proxy  halfClosableConn
	idle           time.Duration
	timer          *time.Timer
	sent, received atomic.Int64 // bytes from the client, and from the proxy
	closed         atomic.Bool  // both connections were closed: the client cannot be answered
}

// copyBothWays copies until both directions have ended, or until no byte was copied for the idle time.
func (p *proxyPipe) copyBothWays() {
	p.timer = time.AfterFunc(p.idle, p.close)
	defer p.timer.Stop()
	var up sync.WaitGroup
	up.Go(func() {
		readErr, writeErr := p.copyDirection(p.proxy, p.client, &p.sent)
		switch {
		case errors.Is(readErr, os.ErrDeadlineExceeded): // the deadline was set below, because the proxy is gone
		case readErr != nil:
			p.close()
		case writeErr == nil:
			_ = p.proxy.CloseWrite() // if the proxy is gone, the other direction sees it
		}
		// After a write error the proxy may still send an answer.
	})
	readErr, writeErr := p.copyDirection(p.client, p.proxy, &p.received)
	switch {
	case writeErr != nil:
		p.close()
	case p.received.Load() == 0:
		// The proxy closed the connection without an answer. If the client has sent a request, or soon does, it gets one from the forwarder.
		deadline := pastDeadline
		if p.sent.Load() == 0 {
			deadline = time.Now().Add(refusedRequestTimeout)
		}
		_ = p.client.SetReadDeadline(deadline) // on an error the client is gone, and reads fail as well
		closeQuietly(p.proxy)
	case readErr != nil:
		p.close() // the answer broke off
	default:
		_ = p.client.CloseWrite() // if the client is gone, the other direction sees it
	}
	up.Wait()
}

// pastDeadline is a deadline in the past, which makes a blocked read return.
var pastDeadline = time.Unix(1, 0)

// isUnanswered reports whether the client has sent something, has received nothing, and is still connected.
func (p *proxyPipe) isUnanswered() bool {
	return p.received.Load() == 0 && p.sent.Load() > 0 && !p.closed.Load()
}

// close closes the connections to the client and to the egress proxy.
func (p *proxyPipe) close() {
	p.closed.Store(true)
	closeQuietly(p.client)
	closeQuietly(p.proxy)
}

// copyDirection copies from src to dst until src ends or an error occurs. It returns the error of the side that failed, and adds the number of
// bytes read to n.
func (p *proxyPipe) copyDirection(dst io.Writer, src io.Reader, n *atomic.Int64) (readErr, writeErr error) {
	buf := make([]byte, 32<<10)
	for {
		k, err := src.Read(buf)
		if k > 0 {
			p.timer.Reset(p.idle)
			n.Add(int64(k))
			if _, err := dst.Write(buf[:k]); err != nil {
				return nil, err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return err, nil
		}
	}
}

// refuseRequest reads a request from a client and answers it with an error. It reads the request first, because clients do not expect an answer
// before they have sent a request.
func refuseRequest(c *net.TCPConn, message string) {
	if err := c.SetReadDeadline(time.Now().Add(refusedRequestTimeout)); err != nil {
		return
	}
	if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil && errors.Is(err, io.EOF) {
		return // the client sent no request
	}
	sendHTTPError(c, message)
}

// sendHTTPError sends an HTTP error to the client, with the message in the form in which clients of model APIs show messages. It blocks until the
// client closes the connection, for refusalLingerTime at most.
func sendHTTPError(c *net.TCPConn, message string) {
	body, err := json.Marshal(map[string]any{"type": "error", "error": map[string]string{"type": "egress_unavailable", "code": "EGRESS_UNAVAILABLE", "message": message}})
	if err != nil {
		return // strings always marshal
	}
	if err := c.SetDeadline(time.Now().Add(refusalLingerTime)); err != nil {
		return
	}
	head := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n",
		http.StatusBadGateway, http.StatusText(http.StatusBadGateway), len(body))
	if _, err := c.Write(append([]byte(head), body...)); err != nil {
		return
	}
	if err := c.CloseWrite(); err != nil {
		return
	}
	// Closing with unread bytes would reset the connection, and the client would lose the answer.
	_, _ = io.Copy(io.Discard, c) // ends with the client, or with the deadline
}
