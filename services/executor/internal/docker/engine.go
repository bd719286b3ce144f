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

// newEngineClient returns a client of the Docker engine at host. It opens no connection.
func newEngineClient(host string) (*client.Client, error) {
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

// translateError returns an engine's error as guest.TranslateError does. ctx is the caller's context.
func (p *Provider) translateError(ctx context.Context, what string, err error) error {
	return guest.TranslateError(ctx, what, err, func(err error) *sandbox.Error {
		switch {
		case isUnreachable(err):
			return &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Err: err, Message: fmt.Sprintf(
				"%s: the Docker engine at %s does not answer: start it, or set the address of one that runs (%v)", what, p.api.DaemonHost(), err)}
		case guest.IsDiskFull(err):
			return &sandbox.Error{Code: sandbox.CodeDiskFull, Err: err, Message: fmt.Sprintf(
				"%s: the disk of the Docker engine at %s is full: remove images or volumes that nobody needs (%v)", what, p.api.DaemonHost(), err)}
		}
		return nil
	})
}

// isUnreachable reports whether an error means that the Docker engine could not be reached, rather than that it refused
// the request.
func isUnreachable(err error) bool {
	var network net.Error
	return client.IsErrConnectionFailed(err) || errdefs.IsUnavailable(err) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.As(err, &network)
}
