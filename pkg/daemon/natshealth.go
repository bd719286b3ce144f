package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/topology"
)

// natsHealthTimeout is the time limit of a request for the health of the NATS server.
const natsHealthTimeout = time.Second

// CheckNATS returns an error that states the reason if a connection to NATS is not up, or if the NATS server reports
// streams that cannot be used, for example because its disk was full. A server that does not report its health passes:
// it has no accounts, or those of an earlier build.
func CheckNATS(ctx context.Context, nc *nats.Conn) error {
	if err := CheckConnection(nc); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, natsHealthTimeout)
	defer cancel()
	answer, err := nc.RequestWithContext(ctx, topology.HealthSubject, []byte(`{"details":true}`))
	if err != nil {
		return nil //nolint:nilerr // see above
	}
	var health struct {
		Data struct {
			Errors []struct{ Stream, Error string }
		}
	}
	if err := json.Unmarshal(answer.Data, &health); err != nil {
		return fmt.Errorf("decode the health of NATS: %w", err)
	}
	if len(health.Data.Errors) == 0 {
		return nil
	}
	var streams []string
	for _, e := range health.Data.Errors {
		if e.Stream != "" && !slices.Contains(streams, e.Stream) {
			streams = append(streams, e.Stream)
		}
	}
	reason := health.Data.Errors[0].Error
	if len(streams) == 0 {
		return fmt.Errorf("NATS is not healthy: %s", reason)
	}
	return fmt.Errorf("NATS cannot use streams %s: %s", strings.Join(streams, ", "), reason)
}
