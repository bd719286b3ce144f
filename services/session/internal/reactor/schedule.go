package reactor

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
)

// scheduleTimer stores the message that makes the session's timer fire at a time. It replaces the timer that was set
// before.
func (r *Reactor) scheduleTimer(ctx context.Context, l *eventlog.SessionState, at time.Time) error {
	body, err := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}.Encode()
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: topology.TimerScheduleSubject(l.ID), Data: body, Header: nats.Header{
		"Nats-Schedule":        {"@at " + at.UTC().Format(time.RFC3339Nano)},
		"Nats-Schedule-Target": {topology.TimerDueSubject(l.ID)},
		headerFireTime:         {strconv.FormatInt(at.UnixMilli(), 10)},
	}}
	if _, err := r.cfg.JetStream.PublishMsg(ctx, msg); err != nil {
		return fmt.Errorf("set the timer of %s: %w", l.ID, err)
	}
	return nil
}
