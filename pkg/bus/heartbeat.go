package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
)

// inProgress is the payload of Msg.InProgress. It is sent as a request, so that the server confirms it and a dead
// connection is noticed before TCP does, which takes minutes.
var inProgress = []byte("+WPI")

// startHeartbeat sends a heartbeat for m every HeartBeat. It closes d.lost if the server has not confirmed one for
// AckWait. The returned function stops it and waits for its end.
func (u *subscription) startHeartbeat(m *nats.Msg, d *delivery) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		u.heartbeat(ctx, m, d)
	}()
	return func() {
		cancel()
		<-done
	}
}

func (u *subscription) heartbeat(ctx context.Context, m *nats.Msg, d *delivery) {
	ticker := time.NewTicker(u.s.cfg.HeartBeat)
	defer ticker.Stop()
	confirmed, lost := time.Now(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		sent := time.Now()
		err := u.sendHeartbeat(ctx, m)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			confirmed = time.Now()
			d.confirm(sent)
			continue
		}
		if !lost && (u.s.cfg.JetStream.Conn().IsClosed() || time.Since(confirmed) >= u.s.cfg.AckWait) {
			lost = true
			close(d.lost)
			u.logger.Warn("no heartbeat was confirmed for AckWait; the message may be redelivered to another handler", "subject", m.Subject, "error", err)
		}
	}
}

// sendHeartbeat sends one heartbeat and waits for the confirmation of the server.
func (u *subscription) sendHeartbeat(ctx context.Context, m *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, u.s.cfg.HeartBeat)
	defer cancel()
	nc := u.s.cfg.JetStream.Conn()
	if err := waitConnected(ctx, nc); err != nil {
		return err
	}
	_, err := nc.RequestWithContext(ctx, m.Reply, inProgress)
	return err
}
