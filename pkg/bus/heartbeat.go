package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
)

// inProgress is what Msg.InProgress sends. Sent as a request it is confirmed by the server, so that a dead connection shows before
// TCP notices, which takes minutes.
var inProgress = []byte("+WPI")

// startHeartbeat tells the server every HeartBeat that m is being worked on, and closes d.lost when it has not confirmed that for
// AckWait. The returned function ends it and waits for its end.
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
		err := u.beat(ctx, m)
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
			u.logger.Warn("no heartbeat confirmed for AckWait, the message may be delivered to another", "subject", m.Subject, "error", err)
		}
	}
}

func (u *subscription) beat(ctx context.Context, m *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, u.s.cfg.HeartBeat)
	defer cancel()
	nc := u.s.cfg.JetStream.Conn()
	if err := waitConnected(ctx, nc); err != nil {
		return err
	}
	_, err := nc.RequestWithContext(ctx, m.Reply, inProgress)
	return err
}
