package bus

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// inProgressPayload is the payload of Msg.InProgress, with which the Subscriber extends AckWait. The Subscriber asks
// for no confirmation, which would double the number of messages. If the server does not receive the payload, it
// redelivers the message after AckWait, as it does when a process is lost.
var inProgressPayload = []byte("+WPI")

// startHeartbeat sends a heartbeat for m every HeartBeat until stop is called. It needs no goroutine between two
// heartbeats, because thousands of handlers may run.
func (u *subscription) startHeartbeat(m *nats.Msg) (stop func()) {
	nc := u.s.cfg.JetStream.Conn()
	var mu sync.Mutex
	var timer *time.Timer
	stopped := false
	beat := func() {
		mu.Lock()
		defer mu.Unlock()
		if stopped || nc.IsClosed() {
			return
		}
		timer.Reset(u.s.cfg.HeartBeat)
		if !nc.IsConnected() {
			return // the client would keep it and send it when it is out of date
		}
		if err := nc.Publish(m.Reply, inProgressPayload); err != nil {
			u.logger.Warn("heartbeat failed; the message may be redelivered to another handler", "subject", m.Subject, "error", err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(u.s.cfg.HeartBeat, beat)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}
