package bus

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/certificate"
)

// The behaviour of a connection while NATS is unavailable.
const (
	reconnectBufferBytes = 8 << 20 // bytes of buffered publishes
	reconnectWait        = 100 * time.Millisecond
)

// ConnOptions returns the options of every connection to NATS: unlimited reconnects, a bounded buffer, a name, and
// handlers that report to logger.
func ConnOptions(logger *slog.Logger) []nats.Option {
	return []nats.Option{
		nats.Name("spool"),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(reconnectWait),
		nats.ReconnectBufSize(reconnectBufferBytes),
		nats.ErrorHandler(func(nc *nats.Conn, sub *nats.Subscription, err error) {
			attrs := []any{"conn", nc.Opts.Name, "error", err}
			if sub != nil {
				attrs = append(attrs, "subject", sub.Subject)
			}
			logger.Error("nats connection error", attrs...)
		}),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if err != nil {
				logger.Warn("nats disconnected", "conn", nc.Opts.Name, "error", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			logger.Info("nats reconnected", "conn", nc.Opts.Name)
		}),
	}
}

// TLSOptions returns the options of a connection that trusts only the authorities of a PEM file and never falls
// back to plain text. The file is read at each attempt to connect. Without a file it returns no options: the URL
// and the server then decide about TLS. Errors name the setting nats-ca.
func TLSOptions(caFile string) ([]nats.Option, error) {
	if caFile == "" {
		return nil, nil
	}
	if _, err := certificate.ReadCertPool(caFile); err != nil {
		return nil, fmt.Errorf("nats-ca: %w", err)
	}
	return []nats.Option{nats.RootCAs(caFile)}, nil
}
