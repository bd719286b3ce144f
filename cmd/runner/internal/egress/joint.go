package egress

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
	// requestWithin is how long a client may take to send the head of a request that is then refused.
	requestWithin = 10 * time.Second
	// lingerFor is how long a refused client may go on sending, so that it reads the answer before the end.
	lingerFor = 2 * time.Second
)

// conn is either end of a joint.
type conn interface {
	net.Conn
	CloseWrite() error
}

// joint copies between two connections. Each direction ends for itself, with
// the end of what is read; a broken one ends both.
type joint struct {
	client, proxy conn
	idle          time.Duration
	timer         *time.Timer
	sent, got     atomic.Int64 // bytes from the client, and from the proxy
	halted        atomic.Bool  // nobody is left to be answered
}

// run copies until both directions have ended, or neither has moved for the idle time.
func (j *joint) run() {
	j.timer = time.AfterFunc(j.idle, j.halt)
	defer j.timer.Stop()
	var up sync.WaitGroup
	up.Go(func() {
		from, to := j.copy(j.proxy, j.client, &j.sent)
		switch {
		case errors.Is(from, os.ErrDeadlineExceeded): // called back, as the proxy is gone
		case from != nil:
			j.halt()
		case to == nil:
			_ = j.proxy.CloseWrite() // a proxy that is gone shows in the other direction
		}
		// A proxy that reads no more may still have something to say.
	})
	from, to := j.copy(j.client, j.proxy, &j.got)
	switch {
	case to != nil:
		j.halt()
	case j.got.Load() == 0:
		// The proxy is gone without a word. If the client has asked, or soon does, it is told.
		within := past
		if j.sent.Load() == 0 {
			within = time.Now().Add(requestWithin)
		}
		_ = j.client.SetReadDeadline(within) // a client that is gone reads nothing either
		closeQuietly(j.proxy)
	case from != nil:
		j.halt() // in the middle of an answer
	default:
		_ = j.client.CloseWrite() // a client that is gone shows in the other direction
	}
	up.Wait()
}

// past is a deadline that calls a reader back.
var past = time.Unix(1, 0)

// unanswered tells that the client asked, is still there, and got nothing.
func (j *joint) unanswered() bool {
	return j.got.Load() == 0 && j.sent.Load() > 0 && !j.halted.Load()
}

// halt ends both directions.
func (j *joint) halt() {
	j.halted.Store(true)
	closeQuietly(j.client)
	closeQuietly(j.proxy)
}

// copy copies until the end of src, and tells which side broke.
func (j *joint) copy(dst io.Writer, src io.Reader, n *atomic.Int64) (from, to error) {
	buf := make([]byte, 32<<10)
	for {
		k, err := src.Read(buf)
		if k > 0 {
			j.timer.Reset(j.idle)
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

// apologize reads a request, as an answer that comes before it would confuse the client, and refuses it.
func apologize(c *net.TCPConn, why string) {
	if err := c.SetReadDeadline(time.Now().Add(requestWithin)); err != nil {
		return
	}
	if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil && errors.Is(err, io.EOF) {
		return // it wanted nothing
	}
	answer(c, why)
}

// answer is an HTTP answer in the form in which clients of models look for a message.
func answer(c *net.TCPConn, why string) {
	body, err := json.Marshal(map[string]any{"type": "error", "error": map[string]string{"type": "egress_unavailable", "code": "EGRESS_UNAVAILABLE", "message": why}})
	if err != nil {
		return // three strings
	}
	if err := c.SetDeadline(time.Now().Add(lingerFor)); err != nil {
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
	// Closing with something unread would reset the connection, and the answer with it.
	_, _ = io.Copy(io.Discard, c) // ends with the client, or with the deadline
}
