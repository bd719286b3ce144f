package session

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/consumergate"
	"github.com/spoolhq/spool/pkg/topology"
)

// gateDrainTime is the time for which a stopping copy of the service continues to answer requests of other services to create
// consumers.
const gateDrainTime = 5 * time.Second

// ConsumerGate holds the settings of the consumer gate, which checks the requests of other services to create consumers
// in NATS. If NATS has accounts, the gate runs in each copy of the session service.
type ConsumerGate struct {
	NATSGatePassword string `name:"nats-gate-password" env:"SPOOL_NATS_GATE_PASSWORD" help:"Password of the NATS user gate, with which each copy checks the services' requests for consumers; empty if NATS has no users, or if another process checks these requests."`
}

// Serve runs the consumer gate on a separate connection to NATS until the caller calls stop, which blocks until all
// accepted requests are answered. Without a password Serve does nothing. url is the URL of the NATS server; caFile is
// the setting nats-ca.
func (g ConsumerGate) Serve(url, caFile string, logger *slog.Logger) (stop func(), err error) {
	if g.NATSGatePassword == "" {
		return func() {}, nil
	}
	secure, err := bus.TLSOptions(caFile)
	if err != nil {
		return nil, err
	}
	closed := make(chan struct{})
	options := append(bus.ConnOptions(logger), nats.Name("spool-gate"), nats.RetryOnFailedConnect(true),
		nats.ClosedHandler(func(*nats.Conn) { close(closed) }), nats.DrainTimeout(gateDrainTime),
		nats.UserInfo(topology.UserGate, g.NATSGatePassword), nats.CustomInboxPrefix(topology.InboxPrefix(topology.UserGate)))
	nc, err := nats.Connect(url, append(options, secure...)...)
	if err != nil {
		return nil, fmt.Errorf("nats-url: connect to %s as %s: %w", url, topology.UserGate, err)
	}
	if err := consumergate.Serve(nc, logger); err != nil {
		nc.Close()
		return nil, err
	}
	return func() {
		if err := nc.Drain(); err != nil {
			nc.Close()
		}
		<-closed
	}, nil
}
