// Package rpc serves spool.v1 over gRPC, with health and reflection.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/metrics"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// minReceive is what any call may bring, in bytes: a message of 1 MiB with its metadata, and room.
const minReceive = 8 << 20

// healthEvery is how often health is looked at.
const healthEvery = 2 * time.Second

// Server is the gRPC server.
type Server struct {
	grpc   *grpc.Server
	health *health.Server
}

type interceptor struct {
	auth   *auth.Authenticator
	counts *metrics.Metrics
	logger *slog.Logger
}

// New makes a Server. maxRequest bounds what a call brings, in bytes.
func New(s *api.Server, a *auth.Authenticator, m *metrics.Metrics, maxRequest int64, logger *slog.Logger) *Server {
	in := interceptor{a, m, logger}
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(int(max(maxRequest, minReceive))),
		grpc.ChainUnaryInterceptor(in.unary),
		grpc.ChainStreamInterceptor(in.stream),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)
	spoolv1.RegisterSessionsServer(server, s)
	spoolv1.RegisterExecutionsServer(server, s)
	spoolv1.RegisterEventsServer(server, s)
	spoolv1.RegisterKeysServer(server, s)
	spoolv1.RegisterBudgetsServer(server, s)
	spoolv1.RegisterDeadLettersServer(server, s)
	spoolv1.RegisterAgentsServer(server, s)
	spoolv1.RegisterInstancesServer(server, s)
	spoolv1.RegisterEnvironmentsServer(server, s)
	spoolv1.RegisterSkillsServer(server, s)
	h := health.NewServer()
	healthv1.RegisterHealthServer(server, h)
	reflection.Register(server)
	return &Server{server, h}
}

// Serve serves until Stop.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

// Stop lets calls finish until ctx ends.
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

// Health keeps the health service to what check says, until ctx ends.
func (s *Server) Health(ctx context.Context, check func(context.Context) map[string]error) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		state := healthv1.HealthCheckResponse_SERVING
		for _, err := range check(ctx) {
			if err != nil {
				state = healthv1.HealthCheckResponse_NOT_SERVING
			}
		}
		s.health.SetServingStatus("", state)
		for _, name := range services() {
			s.health.SetServingStatus(name, state)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func services() (names []string) {
	list := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range list.Len() {
		names = append(names, string(list.Get(i).FullName()))
	}
	return names
}

// admit authenticates; health and reflection tell nothing of anybody's and need no key.
func (i interceptor) admit(ctx context.Context, method string) (context.Context, error) {
	if !strings.HasPrefix(method, "/spool.") {
		return ctx, nil
	}
	header := ""
	if list := metadata.ValueFromIncomingContext(ctx, "authorization"); len(list) > 0 {
		header = list[0]
	}
	p, err := i.auth.Authenticate(ctx, header)
	if err != nil {
		return ctx, err
	}
	return auth.With(ctx, p, manages(method))
}

// manages reports whether a method manages API keys or budgets.
func manages(method string) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return service == spoolv1.Keys_ServiceDesc.ServiceName || service == spoolv1.Budgets_ServiceDesc.ServiceName
}

func (i interceptor) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (out any, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		err = i.settle(info.FullMethod, err)
	}()
	ctx, err = i.admit(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return handle(ctx, req)
}

// admitted is a stream whose context carries the principal.
type admitted struct {
	grpc.ServerStream
	ctx context.Context
}

// Context is the stream's context with the principal.
func (a admitted) Context() context.Context { return a.ctx }

func (i interceptor) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		err = i.settle(info.FullMethod, err)
	}()
	ctx, err := i.admit(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handle(srv, admitted{ss, ctx})
}

// settle makes an error a status, logs what is the server's fault, and counts.
func (i interceptor) settle(method string, err error) error {
	if err == nil {
		i.counts.Call(method, "OK")
		return nil
	}
	var known *problem.Error
	if given, ok := status.FromError(err); ok && !errors.As(err, &known) { // of health, reflection, or gRPC itself
		i.counts.Call(method, given.Code().String())
		return err
	}
	p := problem.From(err)
	switch p.Code {
	case problem.Internal:
		i.logger.Error("a call failed", "method", method, "error", p)
	case problem.Unavailable:
		i.logger.Warn("a call could not be served", "method", method, "error", p)
	case problem.Unauthenticated:
		i.counts.Refused()
	}
	s := p.GRPCStatus()
	i.counts.Call(method, s.Code().String())
	return s.Err()
}
