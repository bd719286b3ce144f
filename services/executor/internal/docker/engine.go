package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/docker/cli/cli/connhelper"
	"github.com/docker/docker/client"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// connect makes a client. Nothing is dialled.
func connect(host string) (*client.Client, error) {
	host = cmp.Or(host, os.Getenv(client.EnvOverrideHost))
	opts := []client.Opt{client.WithTLSClientConfigFromEnv(), client.WithAPIVersionNegotiation()}
	if host == "" {
		return client.NewClientWithOpts(opts...)
	}
	helper, err := connhelper.GetConnectionHelper(host)
	if err != nil {
		return nil, fmt.Errorf("%q: %w: want ssh://user@host", host, err)
	}
	if helper != nil { // ssh: the engine's own command line carries the stream there
		return client.NewClientWithOpts(client.WithHost(helper.Host), client.WithDialContext(helper.Dialer), client.WithAPIVersionNegotiation())
	}
	u, err := client.ParseHostURL(host)
	if err != nil {
		return nil, fmt.Errorf("%w: want unix:///path, tcp://host:port or ssh://user@host", err)
	}
	switch u.Scheme {
	case "unix", "tcp", "http", "https":
		return client.NewClientWithOpts(append(opts, client.WithHost(host))...)
	}
	return nil, fmt.Errorf("%q: scheme %s is not supported: want unix:///path, tcp://host:port or ssh://user@host", host, u.Scheme)
}

// meaning gives an engine's error a code where it has one. ctx is the caller's:
// its own end is the caller's to know.
func (p *Provider) meaning(ctx context.Context, what string, err error) error {
	var typed *sandbox.Error
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.As(err, &typed):
		return err
	case unreachable(err):
		return &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Err: err, Message: fmt.Sprintf(
			"%s: the Docker engine at %s does not answer: start it, or set the address of one that runs (%v)", what, p.api.DaemonHost(), err)}
	case guest.IsFull(err):
		return &sandbox.Error{Code: sandbox.CodeDiskFull, Err: err, Message: fmt.Sprintf(
			"%s: the disk of the Docker engine at %s is full: remove images or volumes that nobody needs (%v)", what, p.api.DaemonHost(), err)}
	}
	return fmt.Errorf("%s: %w", what, err)
}

// unreachable tells whether an error is of the way to the engine, rather than the engine's own.
func unreachable(err error) bool {
	var network net.Error
	return client.IsErrConnectionFailed(err) || errdefs.IsUnavailable(err) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.As(err, &network)
}

// failed is the error of a sandbox that could not be made.
func failed(code, message string, err error) error {
	var typed *sandbox.Error
	if errors.As(err, &typed) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if err != nil {
		message += ": " + err.Error()
	}
	return &sandbox.Error{Code: code, Message: message, Err: err}
}
