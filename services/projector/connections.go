package projector

import (
	"context"
	"errors"
	"runtime"

	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// storeOpener opens a connection to the read models in Postgres, as a *store.Store.
type storeOpener func(context.Context) (*store.Store, error)

// storeConnections holds the connections to Postgres that the groups of a process share: one pool to look up rows, and
// one for transactions that write rows of a single group. The connections hold no locks.
type storeConnections struct{ lookups, writes *storePool }

// newStoreConnections returns the shared connections for a number of groups. Each connection is opened when it is first
// used.
func newStoreConnections(open storeOpener, groups int) *storeConnections {
	n := max(2, min(runtime.GOMAXPROCS(0)+1, groups-1))
	return &storeConnections{lookups: newStorePool(open, n/2), writes: newStorePool(open, n-n/2)}
}

// LoadRows reads the requested rows m from Postgres, on one of the connections for look-ups.
func (c *storeConnections) LoadRows(ctx context.Context, m fold.MissingRows) (p fold.FoundRows, err error) {
	err = c.lookups.withStore(ctx, func(s *store.Store) (err error) {
		p, err = s.LoadRows(ctx, m)
		return err
	})
	return p, err
}

// Apply writes the changes of one group to Postgres, in a transaction of their own.
func (c *storeConnections) Apply(ctx context.Context, w store.GroupWrite) error {
	return c.writes.withStore(ctx, func(s *store.Store) error { return s.Apply(ctx, w) })
}

// close closes all connections. The caller must not call another method at the same time or later.
func (c *storeConnections) close() error { return errors.Join(c.lookups.close(), c.writes.close()) }

// storePool holds a fixed number of connections to Postgres. Each is opened when it is used for the first time, and
// opened again after it broke.
type storePool struct {
	open storeOpener
	free chan *store.Store // nil for a connection that is not open
}

// newStorePool returns a pool of size connections, which open opens when they are first used.
func newStorePool(open storeOpener, size int) *storePool {
	p := &storePool{open: open, free: make(chan *store.Store, size)}
	for range size {
		p.free <- nil
	}
	return p
}

// withStore blocks until a connection is free, and calls f with it.
func (p *storePool) withStore(ctx context.Context, f func(*store.Store) error) (err error) {
	var s *store.Store
	select {
	case <-ctx.Done():
		return ctx.Err()
	case s = <-p.free:
	}
	defer func() {
		if s != nil && s.IsClosed() {
			s = nil
		}
		p.free <- s
	}()
	if s == nil {
		if s, err = p.open(ctx); err != nil {
			return err
		}
	}
	return f(s)
}

// close closes the connections of the pool.
func (p *storePool) close() (err error) {
	for range cap(p.free) {
		if s := <-p.free; s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return err
}
