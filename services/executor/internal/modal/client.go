package modal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	sdk "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// modalURL is the address of Modal's API.
const modalURL = "https://api.modal.com:443"

// checkURL returns an error if the SDK cannot use the URL raw as the address of Modal's API. "" stands for modalURL.
func checkURL(raw string) error {
	if raw == "" {
		return nil
	}
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" || u.Port() == "" || u.Path != "" || u.Scheme != "https" && u.Scheme != "http" {
		return fmt.Errorf("modal-server-url: %.200q is not https://host:port", raw)
	}
	return nil
}

// environmentMutex is held while newSDKClient changes the environment variables of this process.
var environmentMutex sync.Mutex

// newSDKClient returns an SDK client that uses only Spool's settings. The SDK reads the variables MODAL_… and the file ~/.modal.toml when a
// client is created, and prefers them to some parameters. So newSDKClient removes the variables during that time, and passes a profile that
// replaces the file.
func (p *Provider) newSDKClient() (*sdk.Client, error) {
	environmentMutex.Lock()
	defer environmentMutex.Unlock()
	for _, v := range os.Environ() {
		name, value, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, "MODAL_") {
			continue
		}
		if err := os.Unsetenv(name); err != nil {
			return nil, err
		}
		defer os.Setenv(name, value) //nolint:errcheck // the name is valid, since it was set before
	}
	server := p.cfg.ServerURL
	if server == "" {
		server = modalURL
	}
	params := &sdk.ClientParams{
		TokenID: p.cfg.TokenID, TokenSecret: p.cfg.TokenSecret, Environment: p.cfg.Environment, Logger: p.cfg.Logger,
		MaxThrottleWait:       new(callTimeout),
		GRPCUnaryInterceptors: []grpc.UnaryClientInterceptor{p.captureConn},
	}
	if err := decodeInto(&params.Config, map[string]any{"spool": map[string]any{"ServerURL": server, "Active": true}}); err != nil {
		return nil, err
	}
	return sdk.NewClientWithOptions(params)
}

// decodeInto sets *to to a new value of its type with the fields of from. It is for types of the SDK that have no exported name.
func decodeInto[T any](to **T, from any) error {
	raw, err := json.Marshal(from)
	if err != nil {
		return err
	}
	*to = new(T)
	return json.Unmarshal(raw, *to)
}

// captureConn is an interceptor that stores the gRPC connection of the SDK, for requests whose response the SDK returns only in part.
func (p *Provider) captureConn(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	p.conn.Store(conn)
	return invoke(ctx, method, req, reply, conn, opts...)
}

// apiClient returns a gRPC client of Modal's API over the SDK's connection, with the SDK's credentials and retries. lookupApp must have
// succeeded before.
func (p *Provider) apiClient() pb.ModalClientClient { return pb.NewModalClientClient(p.conn.Load()) }

// callModal calls f, which makes requests to Modal's API, with the time limit within, and translates its error. what names the operation in
// the error.
func callModal[T any](ctx context.Context, p *Provider, within time.Duration, what string, f func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if conn := p.conn.Load(); conn != nil && conn.GetState() == connectivity.TransientFailure {
		conn.ResetConnectBackoff() // without this it may wait for two minutes before it dials again
	}
	v, err := f(bounded)
	return v, p.translateError(ctx, what, err)
}

// callModalNoResult is like callModal, for a function that returns only an error.
func (p *Provider) callModalNoResult(ctx context.Context, what string, f func(context.Context) error) error {
	_, err := callModal(ctx, p, callTimeout, what, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

// translateError returns an error of the SDK as guest.TranslateError does. ctx is the caller's context.
func (p *Provider) translateError(ctx context.Context, what string, err error) error {
	return guest.TranslateError(ctx, what, err, func(err error) *sandbox.Error {
		switch {
		case isQuotaError(err):
			return &sandbox.Error{Code: sandbox.CodeQuotaExceeded, Err: err, Message: fmt.Sprintf(
				"%s: Modal gives this workspace no more: wait, or raise its limits (%v)", what, err)}
		case hasCode(err, codes.Unauthenticated, codes.PermissionDenied):
			return &sandbox.Error{Code: sandbox.CodeCredentialsRefused, Err: err, Message: fmt.Sprintf(
				"%s: Modal refuses the token: set SPOOL_MODAL_TOKEN_ID and SPOOL_MODAL_TOKEN_SECRET to one of the workspace (%v)", what, err)}
		case isUnreachable(err):
			return &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Err: err, Message: fmt.Sprintf("%s: Modal does not answer (%v)", what, err)}
		}
		return nil
	})
}

// isQuotaError reports whether an error means that a quota of the Modal workspace is exhausted.
func isQuotaError(err error) bool {
	var exhausted sdk.ResourceExhaustedError
	return errors.As(err, &exhausted) || hasCode(err, codes.ResourceExhausted)
}

// isUnreachable reports whether an error means that Modal's API could not be reached or failed, rather than that it refused the request.
func isUnreachable(err error) bool {
	var network net.Error
	var late sdk.TimeoutError
	var slow sdk.ExecTimeoutError
	return hasCode(err, codes.Unavailable, codes.DeadlineExceeded, codes.Internal, codes.Unknown, codes.Aborted, codes.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.As(err, &network) || errors.As(err, &late) || errors.As(err, &slow)
}

// isNotFound reports whether an error means that an object does not exist at Modal.
func isNotFound(err error) bool {
	var gone sdk.NotFoundError
	return errors.As(err, &gone) || hasCode(err, codes.NotFound)
}

// hasCode reports whether err is a gRPC status with one of the codes.
func hasCode(err error, list ...codes.Code) bool {
	if err == nil {
		return false
	}
	s, ok := status.FromError(err)
	if !ok {
		return false
	}
	for _, c := range list {
		if s.Code() == c {
			return true
		}
	}
	return false
}
