package bus_test

import (
	"bytes"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// TestPull_DeliversAfterAStandstill tests a process that received no CPU time for a while: it reads heartbeats, ends
// of pull requests and a message in one read. The message must arrive in its first delivery. If the client dropped
// it, the server would deliver it again only after AckWait, which is longer than the test.
//
//nolint:paralleltest // it sets GOMAXPROCS, which applies to the whole process
func TestPull_DeliversAfterAStandstill(t *testing.T) {
	// Only one goroutine runs at a time, so the client queues everything from one read before the subscriber takes
	// the first message.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	srv := natstest.RunRestartable(t)
	b := newFixtureOn(t, srv.Conn())
	d := &heldDialer{}
	held := *b
	held.nc = srv.Conn(nats.SetCustomDialer(d))
	held.js = jetStream(t, held.nc)
	messages := subscribe(t, held.subscriber(t, bus.SubscriberConfig{AckWait: 10 * patience, Unrouted: true}), "work.a")
	d.conn.hold()
	// The waiting goroutine takes the first message at once. The client needs room for the others.
	eventually(t, "two heartbeats", func() bool { return d.conn.count("100 Idle Heartbeat") == 2 })
	b.publish(t, "work.a", message.NewMessage("one", []byte("the payload")))
	eventually(t, "the message", func() bool { return d.conn.count("the payload") == 1 })
	d.conn.release()
	msg := wait(t, messages, "the message")
	if n := bus.DeliveryCount(msg); n != 1 {
		t.Errorf("delivery %d", n)
	}
	msg.Ack()
}

// heldDialer creates the one connection of a test.
type heldDialer struct{ conn *heldConn }

func (d *heldDialer) Dial(network, address string) (net.Conn, error) {
	c, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	d.conn = &heldConn{Conn: c}
	d.conn.changed.L = &d.conn.mu
	go d.conn.fill()
	return d.conn, nil
}

// heldConn is a connection whose reads a test can hold back. After the release, one read returns everything that
// arrived.
type heldConn struct {
	net.Conn
	mu       sync.Mutex
	changed  sync.Cond
	held     bool
	buffered bytes.Buffer
	err      error
}

func (d *heldConn) fill() {
	part := make([]byte, 32<<10)
	for {
		n, err := d.Conn.Read(part)
		d.mu.Lock()
		d.buffered.Write(part[:n])
		d.err = err
		d.changed.Broadcast()
		d.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (d *heldConn) Read(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.err == nil && (d.held || d.buffered.Len() == 0) {
		d.changed.Wait()
	}
	if d.buffered.Len() > 0 {
		return d.buffered.Read(p)
	}
	return 0, d.err
}

// SetReadDeadline does nothing. The client sets deadlines for the handshake only, and the test server completes it at
// once.
func (d *heldConn) SetReadDeadline(time.Time) error { return nil }

// SetDeadline does nothing, like SetReadDeadline.
func (d *heldConn) SetDeadline(time.Time) error { return nil }

func (d *heldConn) hold() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = true
}

func (d *heldConn) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = false
	d.changed.Broadcast()
}

func (d *heldConn) count(text string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Count(d.buffered.Bytes(), []byte(text))
}
