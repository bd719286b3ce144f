package projector

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// tellEvery is the pause between two rounds of telling what tenants have taken.
	tellEvery = 25 * time.Millisecond
	// tellWithin bounds a round.
	tellWithin = 10 * time.Second
	// maxTold is how often a tenant's entry is written anew because another copy was faster.
	maxTold = 10
)

// budgets tells services, in the bucket budgets, what tenants may take and have taken.
type budgets struct {
	p    *Projector
	wake chan struct{}

	mu      sync.Mutex
	tenants map[string]bool // that changed and are not told
	all     bool            // and all others that have, or had, a budget
}

func newBudgets(p *Projector) *budgets {
	return &budgets{p: p, wake: make(chan struct{}, 1), tenants: map[string]bool{}, all: true}
}

// changed notes tenants whose budgets, or what they took of them, changed.
func (b *budgets) changed(tenants map[string]bool) {
	if len(tenants) == 0 {
		return
	}
	b.mu.Lock()
	maps.Copy(b.tenants, tenants)
	b.mu.Unlock()
	b.signal()
}

// everything has all tenants told: what was committed last may not have been.
func (b *budgets) everything() {
	b.mu.Lock()
	b.all = true
	b.mu.Unlock()
	b.signal()
}

func (b *budgets) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// run tells what changes until ctx ends. What could not be told is tried again.
func (b *budgets) run(ctx context.Context) {
	retry := backoff{logger: b.p.deps.Logger, doing: "tell what tenants have taken of their budgets"}
	for ctx.Err() == nil {
		err := b.serve(ctx, func() { retry.tries = 0 })
		b.everything()
		if !retry.wait(ctx, err) {
			return
		}
	}
}

// serve tells over one connection.
func (b *budgets) serve(ctx context.Context, told func()) (err error) {
	conn, err := readmodel.Connect(ctx, b.p.cfg.DatabaseURL, readmodel.Schema)
	if err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	kv, err := b.p.js.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.wake:
		}
		if err := b.round(ctx, conn, kv); err != nil {
			return err
		}
		told()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tellEvery):
		}
	}
}

func (b *budgets) round(ctx context.Context, conn *pgx.Conn, kv jetstream.KeyValue) error {
	ctx, cancel := context.WithTimeout(ctx, tellWithin)
	defer cancel()
	b.mu.Lock()
	tenants, all := slices.Collect(maps.Keys(b.tenants)), b.all
	b.tenants, b.all = map[string]bool{}, false
	b.mu.Unlock()
	rows, err := conn.Query(ctx, `SELECT tenant FROM tenant_budgets WHERE $1 OR tenant = ANY($2)
		UNION SELECT tenant FROM tenant_limits WHERE $1 OR tenant = ANY($2) ORDER BY tenant`, all, tenants)
	if err != nil {
		return fmt.Errorf("look for tenants with limits or budgets: %w", err)
	}
	budgeted, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for tenants with limits or budgets: %w", err)
	}
	for _, tenant := range budgeted {
		if err := b.tell(ctx, conn, kv, tenant); err != nil {
			return fmt.Errorf("limits and budgets of tenant %s: %w", tenant, err)
		}
	}
	return nil
}

// tell writes a tenant's entry. The revision is read before the sums are: whoever
// writes between has seen at least as much, and then this is done again.
func (b *budgets) tell(ctx context.Context, conn *pgx.Conn, kv jetstream.KeyValue, tenant string) error {
	for range maxTold {
		have, err := kv.Get(ctx, tenant)
		var revision uint64
		switch {
		case err == nil:
			revision = have.Revision()
		case !errors.Is(err, jetstream.ErrKeyNotFound):
			return err
		}
		t, err := taken(ctx, conn, tenant, b.p.deps.Now())
		if err != nil {
			return err
		}
		if revision == 0 && t.Empty() {
			return nil
		}
		body, err := json.Marshal(t)
		if err != nil {
			return err
		}
		if revision > 0 && bytes.Equal(body, have.Value()) {
			return nil
		}
		switch {
		case t.Empty():
			err = kv.Delete(ctx, tenant, jetstream.LastRevision(revision))
		case revision == 0:
			_, err = kv.Create(ctx, tenant, body)
		default:
			_, err = kv.Update(ctx, tenant, body, revision)
		}
		if !moved(err) {
			return err
		}
	}
	return fmt.Errorf("other copies wrote first %d times in a row", maxTold)
}

// moved tells whether another copy has written meanwhile.
func moved(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, jetstream.ErrKeyExists) || errors.As(err, &api) && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence
}

// taken reads what a tenant may take, and has taken in the periods of a time.
func taken(ctx context.Context, conn *pgx.Conn, tenant string, now time.Time) (budget.Tenant, error) {
	var t budget.Tenant
	rows, err := conn.Query(ctx, "SELECT period, turns, tokens, cost_usd, time_ms FROM tenant_budgets WHERE tenant = $1 AND NOT removed ORDER BY period", tenant)
	if err != nil {
		return t, err
	}
	t.Budgets, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (b budget.Budget, err error) {
		err = r.Scan(&b.Period, &b.Limit.Turns, &b.Limit.Tokens, &b.Limit.CostUSD, &b.Limit.TimeMs)
		b.From, b.Until = b.Period.Span(now)
		return b, err
	})
	if err != nil {
		return t, err
	}
	for i := range t.Budgets {
		b := &t.Budgets[i]
		// A day that is not over may have begun where a clock is ahead: what is later than now counts too.
		err := conn.QueryRow(ctx, "SELECT coalesce(sum(turns), 0), coalesce(sum(tokens), 0), coalesce(sum(cost_usd), 0), coalesce(sum(time_ms), 0) FROM tenant_usage WHERE tenant = $1 AND day >= $2", tenant, b.From).
			Scan(&b.Spent.Turns, &b.Spent.Tokens, &b.Spent.CostUSD, &b.Spent.TimeMs)
		if err != nil {
			return t, err
		}
	}
	var limits string
	switch err := conn.QueryRow(ctx, "SELECT limits FROM tenant_limits WHERE tenant = $1 AND NOT removed", tenant).Scan(&limits); {
	case errors.Is(err, pgx.ErrNoRows):
		return t, nil
	case err != nil:
		return t, err
	}
	if err := json.Unmarshal([]byte(limits), &t.Limits); err != nil || !t.LimitsEvents() {
		return t, err
	}
	t.Used.Day, _ = events.PeriodDay.Span(now)
	return t, conn.QueryRow(ctx, "SELECT coalesce(sum(events), 0), coalesce(sum(event_bytes), 0) FROM tenant_usage WHERE tenant = $1 AND day >= $2", tenant, t.Used.Day).
		Scan(&t.Used.Logged.Events, &t.Used.Logged.Bytes)
}
