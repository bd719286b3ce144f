// Package admission bounds what clients can make a gateway hold at once: the bytes of requests in flight, open
// streams, and connections. All protocols (REST, SSE, WebSocket, gRPC) take bytes from it before they read what a
// client sends.
package admission

import (
	"context"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// requestCost is the number of bytes that every request takes from the limits in addition to its body. It stands
	// for the memory of the request's headers, goroutine and buffers.
	requestCost = 16 << 10
	// FileTransferCost is the number of bytes that a file transfer takes from the limits. It stands for the chunks of
	// the object store that the gateway holds in memory during the transfer.
	FileTransferCost = 512 << 10
	// SnapshotDiffCost is the number of bytes that a comparison of two snapshots takes from the limits. It stands for a pack of
	// each snapshot, and the compared texts.
	SnapshotDiffCost = 16 << 20
	// bodyPieceBytes is the number of bytes of a request body that are taken from the limits at once. A stalled client
	// holds the bytes that it sent, and at most one piece more.
	bodyPieceBytes = 64 << 10
)

// Limits are the limits of a gateway on the requests and streams of its clients. Every field is required.
type Limits struct {
	Bytes         int64 // bytes of all requests in flight
	TenantBytes   int64 // bytes of one tenant's requests in flight
	TenantStreams int   // open streams of one tenant: SSE, WebSocket, gRPC and requests with wait together
	TenantRate    int   // requests per second of one tenant
	TenantBurst   int   // largest burst of requests of one tenant

	// TenantLimits returns a tenant's own limits; for fields that are 0, the fields above apply.
	TenantLimits func(tenant string) events.TenantLimits
}

// Admission counts the bytes, streams and requests of a gateway's clients, and refuses those that exceed the Limits. It
// is safe for concurrent use.
type Admission struct {
	limits Limits

	mu      sync.Mutex
	bytes   int64
	sent    int64 // part of bytes that streams hold for unsent data
	tenants map[string]*tenantInFlight
	waiting map[string][]*waiter     // by tenant, in order of arrival
	rates   map[string]*rate.Limiter // by tenant, for tenants that have sent a request
}

// tenantInFlight counts the bytes and streams that the requests of one tenant hold.
type tenantInFlight struct {
	bytes   int64
	sent    int64 // part of bytes that streams hold for unsent data
	streams int
}

// New returns an Admission with nothing in flight.
func New(l Limits) *Admission {
	return &Admission{limits: l, tenants: map[string]*tenantInFlight{}, waiting: map[string][]*waiter{}, rates: map[string]*rate.Limiter{}}
}

// Request holds the bytes that one request has taken from the limits. It is safe for concurrent use.
type Request struct {
	admission *Admission
	tenant    string
	stream    bool // created by BeginStreamData

	held  int64 // guarded by admission.mu
	ended bool  // guarded by admission.mu
}

// Begin admits a request of a tenant; the tenant is "" for a client that needs no key. The error is
// TOO_MUCH_IN_FLIGHT or OVERLOADED. The caller must call End.
func (a *Admission) Begin(tenant string) (*Request, error) {
	r := &Request{admission: a, tenant: tenant}
	return r, r.ReserveBytes(requestCost)
}

// BeginStreamData returns a Request that holds no bytes yet, for the data that the gateway sends on a stream. All
// streams together may hold half of the bytes of the limits, so that streams with much unsent data leave room for
// other requests. The caller must call End.
func (a *Admission) BeginStreamData(tenant string) *Request {
	return &Request{admission: a, tenant: tenant, stream: true}
}

// CheckRate counts a request against the tenant's request rate. The error is RATE_LIMITED, with the time after which
// the next request is allowed.
func (a *Admission) CheckRate(tenant string) error {
	now := time.Now()
	every, burst := a.requestRate(tenant)
	a.mu.Lock()
	l := a.rates[tenant]
	if l == nil {
		l = rate.NewLimiter(every, burst)
		a.rates[tenant] = l
	}
	a.mu.Unlock()
	if l.Limit() != every || l.Burst() != burst {
		l.SetLimitAt(now, every)
		l.SetBurstAt(now, burst)
	}
	r := l.ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	r.CancelAt(now)
	err := problem.New(problem.RateLimited, "", fmt.Sprintf("the tenant may send %v requests a second to this gateway, %d at once; wait for Retry-After", float64(every), burst))
	err.RetryAfter = wait
	return err
}

// requestRate returns a tenant's request rate and burst. If the tenant has its own rate but no burst of its own, the burst
// is the number of requests in one second.
func (a *Admission) requestRate(tenant string) (rate.Limit, int) {
	own := a.limits.TenantLimits(tenant)
	every, burst := rate.Limit(a.limits.TenantRate), a.limits.TenantBurst
	if own.RequestsPerSecond > 0 {
		every, burst = rate.Limit(own.RequestsPerSecond), max(1, int(math.Ceil(min(own.RequestsPerSecond, math.MaxInt32))))
	}
	if own.RequestBurst > 0 {
		burst = int(own.RequestBurst)
	}
	return every, burst
}

// ReserveBytes adds n bytes to what the request holds. It must be called before the bytes are read. If it returns
// TOO_MUCH_IN_FLIGHT or OVERLOADED, nothing was added.
func (r *Request) ReserveBytes(n int64) error {
	a := r.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	return r.reserveBytesLocked(n)
}

// reserveBytesLocked is ReserveBytes for a caller that holds admission.mu.
func (r *Request) reserveBytesLocked(n int64) error {
	a := r.admission
	if r.ended { // the body is not read any more
		return io.ErrClosedPipe
	}
	held := a.tenantUsage(r.tenant)
	switch {
	case r.stream && held.sent+n > a.limits.TenantBytes/2:
		a.removeIdleTenant(r.tenant)
		return problem.New(problem.TooMuchInFlight, "", fmt.Sprintf("the tenant's streams hold %d bytes that clients have not read; the limit is %d (half of --max-tenant-bytes)", held.sent, a.limits.TenantBytes/2))
	case r.stream && a.sent+n > a.limits.Bytes/2:
		a.removeIdleTenant(r.tenant)
		return problem.New(problem.Overloaded, "", "the streams of this gateway use all the memory for data that clients have not read; try again")
	case held.bytes+n > a.limits.TenantBytes:
		a.removeIdleTenant(r.tenant)
		return problem.New(problem.TooMuchInFlight, "", fmt.Sprintf("the tenant's requests and streams hold %d bytes; the limit is %d (--max-tenant-bytes)", held.bytes, a.limits.TenantBytes))
	case a.bytes+n > a.limits.Bytes:
		a.removeIdleTenant(r.tenant)
		return problem.New(problem.Overloaded, "", "the requests and streams of this gateway use all the memory reserved for them; try again")
	}
	r.addToCounters(n)
	return nil
}

// addToCounters adds n, which may be negative, to the counts of bytes of the request, its tenant and the gateway.
// admission.mu must be held.
func (r *Request) addToCounters(n int64) {
	a := r.admission
	held := a.tenantUsage(r.tenant)
	r.held += n
	a.bytes += n
	held.bytes += n
	if r.stream {
		a.sent += n
		held.sent += n
	}
}

// ReturnBytes releases n of the bytes that the request holds, before the request ends.
func (r *Request) ReturnBytes(n int64) {
	a := r.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	r.releaseBytesLocked(min(n, r.held))
}

// ReleaseBytesBeyond returns bytes to the limits, so that the request holds n bytes at most.
func (r *Request) ReleaseBytesBeyond(n int64) {
	a := r.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	r.releaseBytesLocked(max(0, r.held-n))
}

// End releases all bytes that the request holds. It may be called more than once.
func (r *Request) End() {
	a := r.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	r.ended = true
	r.releaseBytesLocked(r.held)
}

// releaseBytesLocked returns n bytes to the limits and grants them to waiting requests. admission.mu must be held.
func (r *Request) releaseBytesLocked(n int64) {
	if n == 0 {
		return
	}
	r.addToCounters(-n)
	r.admission.removeIdleTenant(r.tenant)
	r.admission.grantWaiters()
}

// requestKey is the key under which a context holds its Request.
type requestKey struct{}

// With returns a context that carries the request, for From.
func With(ctx context.Context, r *Request) context.Context {
	return context.WithValue(ctx, requestKey{}, r)
}

// From returns the request of a context. It panics if there is none, since every request that is served was admitted.
func From(ctx context.Context) *Request {
	r, ok := ctx.Value(requestKey{}).(*Request)
	if !ok {
		panic("admission: the request was not admitted")
	}
	return r
}

// Reader returns a reader of from that calls ReserveBytes for each piece before it reads the piece. Read returns the error of ReserveBytes.
func (r *Request) Reader(from io.Reader) io.Reader { return &limitedReader{request: r, from: from} }

// limitedReader is the io.Reader that Request.Reader returns. It takes bytes from the limits before it reads them.
type limitedReader struct {
	request *Request
	from    io.Reader
	taken   int64 // taken, but not read yet
}

// Read reads at most as many bytes as were taken.
func (r *limitedReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if r.taken == 0 {
		if err := r.request.ReserveBytes(bodyPieceBytes); err != nil {
			return 0, err
		}
		r.taken = bodyPieceBytes
	}
	n, err := r.from.Read(p[:min(int64(len(p)), r.taken)])
	r.taken -= int64(n)
	if err != nil {
		r.request.ReturnBytes(r.taken)
		r.taken = 0
	}
	return n, err
}

// BeginStream counts an open stream of a tenant, or a request that waits for the end of an execution. The caller must call end when the stream ends.
// The error is TOO_MANY_STREAMS.
func (a *Admission) BeginStream(tenant string) (end func(), err error) {
	most, of := a.limits.TenantStreams, " (--max-tenant-streams)"
	if own := a.limits.TenantLimits(tenant).Streams; own > 0 {
		most, of = int(own), ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.tenantUsage(tenant)
	if held.streams >= most {
		a.removeIdleTenant(tenant)
		return nil, problem.New(problem.TooManyStreams, "", fmt.Sprintf("the tenant has %d streams open at this gateway, the most that it may%s; end some, use one WebSocket for many sessions, or send requests without wait", held.streams, of))
	}
	held.streams++
	return sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.tenantUsage(tenant).streams--
		a.removeIdleTenant(tenant)
	}), nil
}

// tenantUsage returns the counts of bytes and streams of a tenant, and creates them if needed. a.mu must be held.
func (a *Admission) tenantUsage(tenant string) *tenantInFlight {
	u := a.tenants[tenant]
	if u == nil {
		u = &tenantInFlight{}
		a.tenants[tenant] = u
	}
	return u
}

// removeIdleTenant removes the counts of a tenant if they are all zero. a.mu must be held.
func (a *Admission) removeIdleTenant(tenant string) {
	if u := a.tenants[tenant]; u != nil && *u == (tenantInFlight{}) {
		delete(a.tenants, tenant)
	}
}

// BytesInFlight returns the number of bytes that all requests and streams hold.
func (a *Admission) BytesInFlight() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bytes
}
