package proxy

import (
	"context"
	"net/http"
	"sync"

	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// Limits of the memory that the requests of sandboxes take.
const (
	maxMemoryBytes        = 256 << 20 // of all sandboxes
	maxSandboxMemoryBytes = 64 << 20  // of each sandbox

	connMemoryBytes    = 32 << 10 // of each connection: its buffers and goroutines, and TLS
	requestMemoryBytes = 64 << 10 // of each open request: the buffers and goroutines of the connection to the upstream, and metering
	headMemoryFactor   = 32       // bytes for each byte of a head that is not parsed yet; the shortest headers take that much
	headerMemoryBytes  = 128      // of each header, besides its text
)

// requestMemory returns the number of bytes to count for an open request, without its body.
func requestMemory(r *http.Request) int {
	n := requestMemoryBytes + 2*len(r.RequestURI)
	for name, values := range r.Header {
		for _, v := range values {
			n += headerMemoryBytes + 2*(len(name)+len(v)) // the forwarded request has a copy
		}
	}
	return n
}

// MemoryLimitBytes is the memory limit of the Go runtime with which a process can serve all that the limits of requests allow, with
// its garbage, the checks of bodies and the rest of the program.
const MemoryLimitBytes = maxMemoryBytes + 204<<20

// memoryOwner is the sandbox and the tenant for which memory is counted.
type memoryOwner struct {
	sandbox *registry.Sandbox
	tenant  string
}

func newMemoryOwner(sb *registry.Sandbox) memoryOwner {
	return memoryOwner{sb, sb.Owner().Tenant}
}

// memoryBudget limits the memory that the requests of sandboxes take: of each sandbox, of each tenant and in total. A tenant may
// take half of what the other tenants leave. So n tenants that take all they can leave the n+1st part of the memory free, and each
// further tenant gets some. It is safe for concurrent use and never blocks.
type memoryBudget struct {
	limit int

	mu        sync.Mutex
	all       int
	sandboxes map[*registry.Sandbox]int
	tenants   map[string]int
}

func newMemoryBudget(limit int) *memoryBudget {
	return &memoryBudget{limit: limit, sandboxes: map[*registry.Sandbox]int{}, tenants: map[string]int{}}
}

// reserve counts n more bytes for an owner, which must release them. It returns false, and counts nothing, if a limit does not allow
// that.
func (m *memoryBudget) reserve(o memoryOwner, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	free := m.limit - m.all - n
	if m.sandboxes[o.sandbox]+n > maxSandboxMemoryBytes || m.tenants[o.tenant]+n > free {
		return false
	}
	m.add(o, n)
	return true
}

// release ends the count of n bytes that reserve has counted.
func (m *memoryBudget) release(o memoryOwner, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(o, -n)
}

// add adds n to the counts of an owner. The caller holds the lock.
func (m *memoryBudget) add(o memoryOwner, n int) {
	m.all += n
	if m.sandboxes[o.sandbox] += n; m.sandboxes[o.sandbox] == 0 {
		delete(m.sandboxes, o.sandbox)
	}
	if m.tenants[o.tenant] += n; m.tenants[o.tenant] == 0 {
		delete(m.tenants, o.tenant)
	}
}

// checkQueue runs the checks of bodies: one at a time for each tenant, so that a tenant cannot take all processors from others, and a
// limited number in total, which bounds their memory. Waiting tenants are served in the order in which they came.
type checkQueue struct {
	slots chan struct{}

	mu      sync.Mutex
	tenants map[string]*tenantChecks
}

// tenantChecks is the queue of one tenant.
type tenantChecks struct {
	running chan struct{} // holds a value while a check of the tenant runs or waits for a slot
	users   int           // guarded by the lock of the checkQueue
}

func newCheckQueue(slots int) *checkQueue {
	return &checkQueue{slots: make(chan struct{}, slots), tenants: map[string]*tenantChecks{}}
}

// run calls check when it is a tenant's turn, and returns nil after its end. Before that it returns the error of ctx.
func (q *checkQueue) run(ctx context.Context, tenant string, check func()) error {
	mine := q.enter(tenant)
	defer q.leave(tenant, mine)
	for _, c := range []chan struct{}{mine.running, q.slots} {
		select {
		case c <- struct{}{}:
			defer func() { <-c }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	// The goroutine frees the stack of a deeply nested body at its end.
	ended := make(chan any, 1)
	go func() {
		defer func() { ended <- recover() }()
		check()
	}()
	if p := <-ended; p != nil {
		panic(p) // the HTTP server closes the connection
	}
	return nil
}

// enter returns the queue of a tenant, which exists until leave was called as often as enter.
func (q *checkQueue) enter(tenant string) *tenantChecks {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.tenants[tenant]
	if t == nil {
		t = &tenantChecks{running: make(chan struct{}, 1)}
		q.tenants[tenant] = t
	}
	t.users++
	return t
}

func (q *checkQueue) leave(tenant string, t *tenantChecks) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(q.tenants, tenant)
	}
}
