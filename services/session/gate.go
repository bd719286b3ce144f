package session

import (
	"fmt"
	"log/slog"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/consumergate"
	"github.com/spoolhq/spool/pkg/topology"
)

// Gate is the setting of the gate for consumers, which runs beside each copy of the service where NATS has accounts.
type Gate struct {
	NATSGatePassword string `name:"nats-gate-password" env:"SPOOL_NATS_GATE_PASSWORD" help:"Password of user gate at NATS, as which each copy checks the services' requests for consumers; empty for a server without users, or where another process does."`
}

// Serve runs the gate on a connection of its own until the caller closes it. Without a password it does nothing, and the
// connection is nil, which can be closed too.
func (g Gate) Serve(url string, logger *slog.Logger) (*nats.Conn, error) {
	if g.NATSGatePassword == "" {
		return nil, nil
	}
	options := append(bus.ConnOptions(logger), nats.Name("spool-gate"), nats.RetryOnFailedConnect(true),
		nats.UserInfo(topology.UserGate, g.NATSGatePassword), nats.CustomInboxPrefix(topology.InboxPrefix(topology.UserGate)))
	nc, err := nats.Connect(url, options...)
	if err != nil {
		return nil, fmt.Errorf("nats-url: connect to %s as %s: %w", url, topology.UserGate, err)
	}
	if err := consumergate.Serve(nc, logger); err != nil {
		nc.Close()
		return nil, err
	}
	return nc, nil
}
