package fanout

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/coder/websocket/wsjson"
)

const (
	// slowJoins is the largest number of sessions that a slow client joins, so that its buffers fill within seconds.
	slowJoins = 100
	// slowBuffer is the size of the receive buffer of a slow client.
	slowBuffer = 4 << 10
)

// startSlow connects the slow clients. stop closes their connections.
func startSlow(ctx context.Context, cfg clientsConfig, readers []*reader) (stop func(), err error) {
	var list []*slowConn
	stop = func() {
		for _, c := range list {
			_ = c.Close() // the gateway may have closed it
		}
	}
	for i := range cfg.Stalled + cfg.Trickling {
		c, err := connectSlow(ctx, cfg.URL, readers[:min(len(readers), slowJoins)])
		if err != nil {
			stop()
			return nil, err
		}
		list = append(list, c)
		c.slow(i >= cfg.Stalled)
	}
	return stop, nil
}

// connectSlow opens a WebSocket that joins the sessions of readers, and that reads normally so far.
func connectSlow(ctx context.Context, url string, readers []*reader) (*slowConn, error) {
	var slow *slowConn
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		slow = &slowConn{Conn: conn, closed: make(chan struct{})}
		return slow, conn.(*net.TCPConn).SetReadBuffer(slowBuffer)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(url, "http")+"/api/ws", &websocket.DialOptions{HTTPClient: client}) //nolint:bodyclose // an upgraded connection has none
	for i := 0; err == nil && i < len(readers); i++ {
		err = wsjson.Write(ctx, conn, map[string]any{"type": "session:join", "requestId": fmt.Sprint(i), "sessionId": readers[i].session, "after": 0})
	}
	if err != nil {
		return nil, fmt.Errorf("connect a slow client: %w", err)
	}
	return slow, nil
}

// slowConn is the connection of a client that reads too slowly: after the WebSocket was opened, it is read by method
// slow only.
type slowConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Close implements net.Conn.
func (c *slowConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// slow reads one byte a second from the connection if trickle is set, and otherwise nothing.
func (c *slowConn) slow(trickle bool) {
	if !trickle {
		return
	}
	go func() {
		for {
			select {
			case <-c.closed:
				return
			case <-time.After(time.Second):
			}
			if _, err := c.Read(make([]byte, 1)); err != nil {
				return
			}
		}
	}()
}

// cutStreams returns the number of streams that the gateway ended because their clients were too slow.
func cutStreams(ctx context.Context, url string) (n int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) != 2 || !strings.Contains(f[0], "clients_cut_total{") || !strings.Contains(f[0], `"SLOW_CLIENT"`) {
			continue
		}
		count, e := strconv.ParseFloat(f[1], 64)
		n, err = n+int(count), errors.Join(err, e)
	}
	return n, errors.Join(err, lines.Err())
}
