// Package rpc serves spool.v1 over gRPC, with health and reflection.
package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/metrics"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Largest messages in bytes. A method with files has the setting max-request, but at least minFilesMessage: a message of 1
// MiB with its metadata, and some spare bytes.
const (
	minFilesMessage      = 2 << 20
	maxDefinitionMessage = 5 << 20 // for methods with a definition, which may have 4 MiB
	maxOtherMessage      = 256 << 10
)

const (
	// maxConnectionCalls is the largest number of concurrent calls on a connection.
	maxConnectionCalls = 256
	// callWindow is the number of bytes that a client may send of a call before the gateway reads them;
	// connectionWindow is the same for all calls of a connection. They are fixed, because grpc-go would raise them to
	// 16 MiB for a fast client.
	callWindow, connectionWindow = 64 << 10, 1 << 20
	// maxHeaderBytes is the largest size of the headers of a call, in bytes.
	maxHeaderBytes = 32 << 10
	// maxPendingKeyLookups is the largest number of calls that may wait for the look-up of their keys.
	maxPendingKeyLookups = 1024
	// handshakeTimeout bounds how long a client may take to open a connection.
	handshakeTimeout = 10 * time.Second
	// idleTimeout is the maximum time that a connection may stay open without a call.
	idleTimeout = 15 * time.Minute
)

// healthInterval is the interval at which UpdateHealth checks the gateway's dependencies.
const healthInterval = 2 * time.Second

// Server is the gRPC server.
type Server struct {
	grpc   *grpc.Server
	health *health.Server
}

// Config configures a Server. Every field except TLS is required.
type Config struct {
	API         *api.Server
	Auth        *auth.Authenticator
	Proxies     auth.TrustedProxies
	Admission   *admission.Admission
	Metrics     *metrics.Metrics
	Logger      *slog.Logger
	MaxRequest  int64         // largest message with files, in bytes
	ReadTimeout time.Duration // maximum time that a message may take to arrive
	TLS         *tls.Config   // nil serves without TLS
}

// New returns a Server.
func New(cfg Config) *Server {
	in := &interceptor{Config: cfg, limits: messageLimits(cfg.MaxRequest)}
	secure := insecure.NewCredentials()
	if cfg.TLS != nil {
		secure = credentials.NewTLS(cfg.TLS)
	}
	server := streamRegistrar{intercept: in.interceptCall, Server: grpc.NewServer(
		grpc.Creds(secure),
		grpc.InTapHandle(in.checkBeforeStream),
		grpc.MaxRecvMsgSize(maxOtherMessage), // for calls that limitedStream does not read; there are none
		grpc.MaxConcurrentStreams(maxConnectionCalls),
		grpc.StaticStreamWindowSize(callWindow), grpc.StaticConnWindowSize(connectionWindow),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second, MaxConnectionIdle: idleTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)}
	s := cfg.API
	spoolv1.RegisterSessionsServer(server, s)
	spoolv1.RegisterExecutionsServer(server, s)
	spoolv1.RegisterApprovalsServer(server, s)
	spoolv1.RegisterEventsServer(server, s)
	spoolv1.RegisterKeysServer(server, s)
	spoolv1.RegisterSignInServer(server, s)
	spoolv1.RegisterBudgetsServer(server, s)
	spoolv1.RegisterLimitsServer(server, s)
	spoolv1.RegisterDeadLettersServer(server, s)
	spoolv1.RegisterAuditServer(server, s)
	spoolv1.RegisterAgentsServer(server, s)
	spoolv1.RegisterInstancesServer(server, s)
	spoolv1.RegisterEnvironmentsServer(server, s)
	spoolv1.RegisterSkillsServer(server, s)
	h := health.NewServer()
	healthv1.RegisterHealthServer(server, h)
	reflection.Register(server)
	return &Server{server.Server, h}
}

// Serve serves until Stop is called.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

// Stop waits for running calls to finish, until ctx ends, and then aborts them.
func (s *Server) Stop(ctx context.Context) {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
	}
}

// UpdateHealth updates the health service with the result of check, until ctx ends.
func (s *Server) UpdateHealth(ctx context.Context, check func(context.Context) map[string]error) {
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		state := healthv1.HealthCheckResponse_SERVING
		for _, err := range check(ctx) {
			if err != nil {
				state = healthv1.HealthCheckResponse_NOT_SERVING
			}
		}
		s.health.SetServingStatus("", state)
		for _, name := range healthServices() {
			s.health.SetServingStatus(name, state)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// healthServices returns the full names of the services that the health service reports on.
func healthServices() (names []string) {
	list := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range list.Len() {
		names = append(names, string(list.Get(i).FullName()))
	}
	return names
}

// isManagementMethod reports whether a gRPC method manages API keys, limits or budgets.
func isManagementMethod(method string) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	switch service {
	case spoolv1.Keys_ServiceDesc.ServiceName, spoolv1.Budgets_ServiceDesc.ServiceName, spoolv1.Limits_ServiceDesc.ServiceName:
		return true
	}
	return false
}

// finishCall converts the error of a call to a gRPC status, logs errors of the server, and counts the call.
func (i *interceptor) finishCall(method string, err error) error {
	if err == nil {
		i.Metrics.CountCall(method, "OK")
		return nil
	}
	var known *problem.Error
	if given, ok := status.FromError(err); ok && !errors.As(err, &known) { // from health, reflection, or gRPC itself
		i.Metrics.CountCall(method, given.Code().String())
		return err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = problem.Invalid("", "the call ended before its message had arrived")
	}
	p := problem.From(err)
	switch p.Code {
	case problem.Internal:
		i.Logger.Error("gRPC call failed", "method", method, "error", p)
	case problem.Unavailable:
		i.Logger.Warn("gRPC call refused: not available", "method", method, "error", p)
	case problem.Unauthenticated:
		i.Metrics.CountUnauthenticated()
	}
	s := p.GRPCStatus()
	i.Metrics.CountCall(method, s.Code().String())
	return s.Err()
}
