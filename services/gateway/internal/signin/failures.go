package signin

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Limits of refused sign-ins of one address.
const (
	failureBurst    = 20              // at once, after a pause
	failureInterval = 3 * time.Second // between two of them, in the long run
	// maxFailureAddresses bounds the addresses in memory.
	maxFailureAddresses = 10_000
)

// Failures limits the refused sign-ins of each client address at one gateway. It is safe for concurrent use.
type Failures struct {
	now func() time.Time

	mu        sync.Mutex
	addresses map[string]*attempts // addresses with recent failures or with sign-ins that are being checked
}

// attempts counts the sign-ins of an address.
type attempts struct {
	failures *rate.Limiter
	pending  int // sign-ins that are being checked, each of which may fail
}

// NewFailures returns a Failures with a clock.
func NewFailures(now func() time.Time) *Failures {
	return &Failures{now: now, addresses: map[string]*attempts{}}
}

// Begin begins a sign-in from an address. The error is RATE_LIMITED if too many sign-ins of the address were refused, or
// would be if all that are being checked fail. The caller must call end, with whether the sign-in was refused.
func (f *Failures) Begin(address string) (end func(refused bool), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, key := f.now(), failureKey(address)
	a := f.addresses[key]
	if a == nil {
		if len(f.addresses) >= maxFailureAddresses {
			f.forget(now)
		}
		a = &attempts{failures: rate.NewLimiter(rate.Every(failureInterval), failureBurst)}
		f.addresses[key] = a
	}
	if tokens := a.failures.TokensAt(now) - float64(a.pending); tokens < 1 {
		err := problem.New(problem.RateLimited, "", "too many sign-ins from your address were refused; wait for Retry-After")
		err.RetryAfter = time.Duration((1 - tokens) * float64(failureInterval))
		return nil, err
	}
	a.pending++
	return func(refused bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		a.pending--
		if refused {
			a.failures.AllowN(f.now(), 1)
		}
		if f.addresses[key] == a && a.isIdle(f.now()) {
			delete(f.addresses, key)
		}
	}, nil
}

// isIdle reports whether the address has no recent failure and no sign-in that is being checked.
func (a *attempts) isIdle(now time.Time) bool {
	return a.pending == 0 && a.failures.TokensAt(now) >= failureBurst
}

// forget removes the idle addresses, and all if none is idle: memory stays bounded, and an attacker with so many addresses is
// not limited by them anyway. f.mu must be held.
func (f *Failures) forget(now time.Time) {
	for key, a := range f.addresses {
		if a.isIdle(now) {
			delete(f.addresses, key)
		}
	}
	if len(f.addresses) >= maxFailureAddresses {
		clear(f.addresses)
	}
}

// failureKey returns what counts as one address: an IPv4 address, or a /64 of IPv6, which one client may have as a whole.
func failureKey(address string) string {
	a, err := netip.ParseAddr(address)
	if err != nil || a.Is4() {
		return address
	}
	p, err := a.Prefix(64)
	if err != nil {
		return address
	}
	return p.String()
}
