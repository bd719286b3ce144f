package jslog

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// TestTransient_CoversBrokenConnections checks that an append whose write met a broken connection is settled and
// repeated, and does not end with an unknown outcome.
func TestTransient_CoversBrokenConnections(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		&net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE},
		&net.OpError{Op: "write", Net: "tcp", Err: syscall.ECONNRESET},
		net.ErrClosed, io.ErrClosedPipe, io.EOF, nats.ErrDisconnected,
	} {
		if !isTransient(fmt.Errorf("publish: %w", err)) {
			t.Errorf("%v is not transient", err)
		}
	}
	for _, err := range []error{nats.ErrMaxPayload, nats.ErrConnectionClosed, errors.New("unknown"), fmt.Errorf("%w: %w", eventlog.ErrUnavailable, io.EOF)} {
		if isTransient(err) {
			t.Errorf("%v is transient", err)
		}
	}
}
