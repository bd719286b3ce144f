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

// A process that got no time for a while finds heartbeats, the ends of requests and a message in one read. The message is delivered,
// the first time: one that is dropped on the way comes again after AckWait, which is longer here than the test.
//
//nolint:paralleltest // it sets what holds for the whole process
func TestPullAfterStandstill(t *testing.T) {
	// Only one goroutine at a time, so that what came in one read is handed on before anyone takes the first of it.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	srv := natstest.RunRestartable(t)
	b := newBedOn(t, srv.Conn())
	d := &damDialer{}
	held := *b
	held.nc = srv.Conn(nats.SetCustomDialer(d))
	held.js = jetStream(t, held.nc)
	messages := subscribe(t, held.subscriber(t, bus.SubscriberConfig{AckWait: 10 * patience, Unrouted: true}), "work.a")
	d.conn.hold()
	// The goroutine that waits takes the first at once; the client needs room for the rest.
	eventually(t, "two heartbeats", func() bool { return d.conn.count("100 Idle Heartbeat") == 2 })
	b.publish(t, "work.a", message.NewMessage("one", []byte("the payload")))
	eventually(t, "the message", func() bool { return d.conn.count("the payload") == 1 })
	d.conn.release()
	msg := wait(t, messages, "the message")
	if n := bus.Delivered(msg); n != 1 {
		t.Errorf("delivery %d", n)
	}
	msg.Ack()
}

// damDialer makes the one connection of a test.
type damDialer struct{ conn *dam }

func (d *damDialer) Dial(network, address string) (net.Conn, error) {
	c, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	d.conn = &dam{Conn: c}
	d.conn.changed.L = &d.conn.mu
	go d.conn.fill()
	return d.conn, nil
}

// dam is a connection whose reader can be held back, and then gets all at once.
type dam struct {
	net.Conn
	mu      sync.Mutex
	changed sync.Cond
	held    bool
	water   bytes.Buffer
	err     error
}

func (d *dam) fill() {
	part := make([]byte, 32<<10)
	for {
		n, err := d.Conn.Read(part)
		d.mu.Lock()
		d.water.Write(part[:n])
		d.err = err
		d.changed.Broadcast()
		d.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (d *dam) Read(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.err == nil && (d.held || d.water.Len() == 0) {
		d.changed.Wait()
	}
	if d.water.Len() > 0 {
		return d.water.Read(p)
	}
	return 0, d.err
}

// SetReadDeadline is for the handshake, which this server does at once.
func (d *dam) SetReadDeadline(time.Time) error { return nil }

// SetDeadline is as SetReadDeadline.
func (d *dam) SetDeadline(time.Time) error { return nil }

func (d *dam) hold() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = true
}

func (d *dam) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = false
	d.changed.Broadcast()
}

func (d *dam) count(text string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Count(d.water.Bytes(), []byte(text))
}
