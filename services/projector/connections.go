package projector

import (
	"context"
	"errors"
	"runtime"

	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// openStore opens a connection to the read models, as a *store.Store.
type openStore func(context.Context) (*store.Store, error)

// connections are the connections to Postgres that the groups of a process share for look-ups of rows, and for writes
// in transactions of a single group. They hold no locks.
type connections struct{ lookups, writes *pool }

// newConnections returns the connections for a number of groups. None of them is opened yet.
func newConnections(open openStore, groups int) *connections {
	n := max(2, min(runtime.GOMAXPROCS(0)+1, groups-1))
	return &connections{lookups: newPool(open, n/2), writes: newPool(open, n-n/2)}
}

// Load reads the rows of m from Postgres, on one of the connections for look-ups.
func (c *connections) Load(ctx context.Context, m fold.Missing) (p fold.Present, err error) {
	err = c.lookups.use(ctx, func(s *store.Store) (err error) {
		p, err = s.Load(ctx, m)
		return err
	})
	return p, err
}

// Apply writes the changes of one group in a transaction of their own.
func (c *connections) Apply(ctx context.Context, w store.Write) error {
	return c.writes.use(ctx, func(s *store.Store) error { return s.Apply(ctx, w) })
}

// close closes all connections. No other method may be called at the same time or later.
func (c *connections) close() error { return errors.Join(c.lookups.close(), c.writes.close()) }

// pool is a fixed number of connections to Postgres. Each is opened when it is used for the first time, and again after
// it broke.
type pool struct {
	open openStore
	free chan *store.Store // nil for a connection that is not open
}

func newPool(open openStore, size int) *pool {
	p := &pool{open: open, free: make(chan *store.Store, size)}
	for range size {
		p.free <- nil
	}
	return p
}

// use calls f with a connection, after waiting until one is free.
func (p *pool) use(ctx context.Context, f func(*store.Store) error) (err error) {
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

func (p *pool) close() (err error) {
	for range cap(p.free) {
		if s := <-p.free; s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return err
}
