package rpc

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
)

// interceptor authenticates and admits gRPC calls, and converts the errors of their handlers to statuses.
type interceptor struct {
	Config
	limits    map[string]int // largest message in bytes, by full method name; maxOtherMessage for all others
	undecided atomic.Int64   // number of calls whose key was not looked up yet
}

// messageLimits returns the largest message of each method in bytes, by full method name.
func messageLimits(maxRequest int64) map[string]int {
	out := map[string]int{}
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			name := fmt.Sprintf("/%s/%s", services.Get(i).FullName(), m.Name())
			switch fields := m.Input().Fields(); {
			case fields.ByName("workspace_files") != nil:
				out[name] = int(max(maxRequest, minFilesMessage))
			case fields.ByName("spec") != nil:
				out[name] = maxDefinitionMessage
			default:
				out[name] = maxOtherMessage
			}
		}
	}
	return out
}

// isHealthMethod reports whether a method belongs to the health service, the only one besides those of auth.IsPublic that needs
// no key.
func isHealthMethod(method string) bool {
	return strings.HasPrefix(method, "/"+healthv1.Health_ServiceDesc.ServiceName+"/")
}

// authorizationValue returns the first value of the call's authorization metadata, or "" if it has none.
func authorizationValue(md metadata.MD) string {
	if list := md.Get("authorization"); len(list) > 0 {
		return list[0]
	}
	return ""
}

// endUser returns the end user that the metadata of a call names. gRPC metadata allows text beyond ASCII only under
// names that end with -bin.
func endUser(md metadata.MD) (string, error) {
	name := strings.ToLower(auth.HeaderUser)
	if binary := md.Get(name + "-bin"); len(binary) > 0 {
		return auth.ParseUser(name+"-bin", append(binary, md.Get(name)...))
	}
	return auth.ParseUser(name, md.Get(name))
}

// apiKeyCheckedContextKey is the context key of a func() that admit calls when the API key of a call was looked up, or was
// refused.
type apiKeyCheckedContextKey struct{}

// checkBeforeStream is the server's tap handle: it runs before a call gets a stream, in the goroutine that reads the
// connection. It refuses a call whose key is missing or malformed before any memory is used for the call, and bounds
// how many calls wait for the look-up of their keys.
func (i *interceptor) checkBeforeStream(ctx context.Context, info *tap.Info) (context.Context, error) {
	if isHealthMethod(info.FullMethodName) || auth.IsPublic(info.FullMethodName) {
		return ctx, nil
	}
	if err := i.Auth.CheckHeader(authorizationValue(info.Header)); err != nil {
		return ctx, i.finishCall("none", err)
	}
	if i.undecided.Add(1) > maxPendingKeyLookups {
		i.undecided.Add(-1)
		return ctx, i.finishCall("none", problem.New(problem.Overloaded, "", "too many calls are waiting for the look-up of their keys; try again"))
	}
	decided := sync.OnceFunc(func() { i.undecided.Add(-1) })
	context.AfterFunc(ctx, decided) // for a call that never reaches its interceptor, such as one of an unknown method
	return context.WithValue(ctx, apiKeyCheckedContextKey{}, decided), nil
}

// admitCall authenticates a call and returns the context for its handler. The health service needs no key, because it
// exposes nothing about tenants.
func (i *interceptor) admitCall(ctx context.Context, method string) (_ context.Context, tenant string, err error) {
	if decided, ok := ctx.Value(apiKeyCheckedContextKey{}).(func()); ok {
		defer decided()
	}
	if isHealthMethod(method) {
		return ctx, "", nil
	}
	if auth.IsPublic(method) {
		md, _ := metadata.FromIncomingContext(ctx)
		ctx = signin.WithClient(ctx, signin.Client{Address: i.clientIP(ctx, md)})
		return ctx, auth.NoTenant, i.Admission.CheckRate(auth.NoTenant)
	}
	md, _ := metadata.FromIncomingContext(ctx)
	p, err := i.Auth.Authenticate(ctx, authorizationValue(md))
	if err != nil {
		return ctx, "", err
	}
	if p.User, err = endUser(md); err != nil {
		return ctx, "", err
	}
	p.Address = i.clientIP(ctx, md)
	if !p.Admin || !isManagementMethod(method) { // rate limits of a tenant must not lock out the operator
		if err := i.Admission.CheckRate(p.Tenant); err != nil {
			return ctx, "", err
		}
	}
	if strings.HasPrefix(method, "/grpc.") { // reflection is available with every key
		return ctx, p.Tenant, nil
	}
	if ctx, err = auth.With(ctx, p, isManagementMethod(method)); err == nil {
		err = auth.CheckAllowed(ctx, method)
	}
	return ctx, p.Tenant, err
}

// clientIP returns the IP address of the client of a call, or "" if it is unknown.
func (i *interceptor) clientIP(ctx context.Context, md metadata.MD) string {
	from, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	return i.Proxies.ClientIP(from.Addr.String(), md.Get("x-forwarded-for"))
}

// interceptCall runs around every call, before a message of the call is read. handle receives the stream from which
// it must read messages, with the principal in its context.
func (i *interceptor) interceptCall(s grpc.ServerStream, method string, streams bool, handle func(grpc.ServerStream) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		err = i.finishCall(method, err)
	}()
	ctx, tenant, err := i.admitCall(s.Context(), method)
	if err != nil {
		return err
	}
	request, err := i.Admission.Begin(tenant)
	if err != nil {
		return err
	}
	defer request.End()
	if streams {
		end, err := i.Admission.BeginStream(tenant)
		if err != nil {
			return err
		}
		defer end()
	}
	limit, ok := i.limits[method]
	if !ok {
		limit = maxOtherMessage
	}
	return handle(&limitedStream{ServerStream: s, ctx: admission.With(ctx, request), request: request, limit: limit, timeout: i.ReadTimeout})
}
