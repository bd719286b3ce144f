package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
)

// Attach connects in and out to the socket of a runner that was not claimed, as a follower: it sends the Attach line,
// then copies as CopyBothWays does.
func Attach(ctx context.Context, socket string, a runner.Attach, in io.Reader, out io.Writer) error {
	line := fmt.Sprintf("{\"epoch\":%d,\"after\":%d}\n", a.Epoch, a.After)
	return CopyBothWays(ctx, socket, io.MultiReader(strings.NewReader(line), in), out)
}

// CopyBothWays connects in and out to the runner's socket and copies in both directions until either end closes. It
// leaves no goroutine behind when the caller is gone, except the one that reads in.
func CopyBothWays(ctx context.Context, socket string, in io.Reader, out io.Writer) error {
	c, err := dial(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // the copy below reports
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	gone := make(chan struct{})
	go func() {
		// It ends with the caller's stream or with the process: CopyBothWays does not wait for it.
		_, _ = io.Copy(c, in) // a broken stream is an ended one
		_ = c.Close()         // ends the other direction
		close(gone)
	}()
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(out, c)
		copied <- err
	}()
	select {
	case err = <-copied:
	case <-gone:
		// If the caller is gone and its end of out is open and full, the copy never ends.
		select {
		case err = <-copied:
		case <-time.After(lastLinesTimeout):
			return nil
		}
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("follow the journal: %w", err)
	}
	return nil
}

// SendCommand sends a single command that needs no epoch to the runner's socket, and returns the line of the reply.
func SendCommand(ctx context.Context, socket string, op runner.Op) ([]byte, error) {
	c, err := dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer c.Close() //nolint:errcheck // only read from
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err := fmt.Fprintf(c, "{\"id\":1,\"op\":%q}\n", op); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	line, err := io.ReadAll(c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if len(line) == 0 {
		return nil, fmt.Errorf("%s: the runner closed without an answer", op)
	}
	return line, nil
}

// SendSecret sends the sandbox's secret to the runner, which claims the runner: from then on it obeys only callers that
// know the secret.
func SendSecret(ctx context.Context, socket, secret string) error {
	c, err := dial(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // only read from
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	return runner.SendSecret(c, secret)
}

// dial connects to the runner's socket.
func dial(ctx context.Context, socket string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("no runner answers at %s (is `runner serve` running?): %w", socket, err)
	}
	return c, nil
}
