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
	// maxSlowJoins is the maximum number of sessions that a slow client joins. They are so many that its buffers fill
	// within seconds.
	maxSlowJoins = 100
	// slowReceiveBuffer is the size of the receive buffer of a slow client's socket, in bytes.
	slowReceiveBuffer = 4 << 10
)

// startSlowClients connects the slow clients of cfg, each of which joins sessions of readers and then reads nothing, or
// one byte a second. stop closes their connections.
func startSlowClients(ctx context.Context, cfg clientsConfig, readers []*sessionClient) (stop func(), err error) {
	var list []*slowClientConn
	stop = func() {
		for _, c := range list {
			_ = c.Close() // the gateway may have closed it
		}
	}
	for i := range cfg.Stalled + cfg.Trickling {
		c, err := connectSlowClient(ctx, cfg.URL, readers[:min(len(readers), maxSlowJoins)])
		if err != nil {
			stop()
			return nil, err
		}
		list = append(list, c)
		c.readSlowly(i >= cfg.Stalled)
	}
	return stop, nil
}

// connectSlowClient opens a WebSocket to the gateway at url and joins the sessions of readers. Until the caller calls
// readSlowly, the client reads at the normal speed.
func connectSlowClient(ctx context.Context, url string, readers []*sessionClient) (*slowClientConn, error) {
	var slow *slowClientConn
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		slow = &slowClientConn{Conn: conn, closed: make(chan struct{})}
		return slow, conn.(*net.TCPConn).SetReadBuffer(slowReceiveBuffer)
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

// slowClientConn is the TCP connection of a client that reads too slowly. After the WebSocket was opened, only
// readSlowly reads from it.
type slowClientConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Close closes the connection and ends readSlowly. It implements net.Conn.
func (c *slowClientConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// readSlowly starts to read one byte a second from the connection if trickle is true, and otherwise reads nothing.
func (c *slowClientConn) readSlowly(trickle bool) {
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

// countCutStreams returns the number of streams that the gateway at url ended because their clients were too slow.
func countCutStreams(ctx context.Context, url string) (n int, err error) {
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
