package projector

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/truncate"
)

// rebuiltTables lists the tables that a fold of the log writes, each with its primary key.
var rebuiltTables = []struct{ table, key string }{
	{readmodel.TableSessions, "tenant, id"},
	{readmodel.TableDeletedSessions, "tenant, id"},
	{readmodel.TableExecutions, "tenant, session, id"},
	{readmodel.TableBlocks, "tenant, session, id"},
	{readmodel.TableEvents, "tenant, session, seq"},
	{readmodel.TableToolCalls, "tenant, session, tool_use_id"},
	{readmodel.TableConversations, "tenant, session, id"},
	{readmodel.TableApprovals, "tenant, session, id"},
	{readmodel.TableSandboxes, "tenant, session, id"},
	{readmodel.TableFiles, "tenant, session, id"},
	{readmodel.TableUsage, "tenant, session, id"},
	{readmodel.TableKeys, "tenant, id"},
	{readmodel.TableCatalogueEntries, "tenant, id"},
	{readmodel.TableCatalogueVersions, "tenant, id, version"},
	{readmodel.TableTenantUsage, "tenant, id"},
	{readmodel.TableTenantBudgets, "tenant, period"},
	{readmodel.TableTenantLimits, "tenant"},
	{readmodel.TableAudit, "tenant, shard, seq"},
	{readmodel.TableSessionStates, "tenant, session, seq"},
	{readmodel.TablePoison, "position"},
}

// DifferenceError reports the first row in which the read models differ from a fold of the log.
type DifferenceError struct {
	Table   string
	Columns []string // columns that differ; nil if one of the rows is missing
	Live    string   // row of the read models as JSON; "" for none
	Rebuilt string
}

func (e *DifferenceError) Error() string {
	switch {
	case e.Live == "":
		return fmt.Sprintf("table %s does not have the row %s, which the log has: run spool rebuild", e.Table, truncate.Text(e.Rebuilt, 400))
	case e.Rebuilt == "":
		return fmt.Sprintf("table %s has the row %s, which the log does not have: run spool rebuild", e.Table, truncate.Text(e.Live, 400))
	}
	return fmt.Sprintf("table %s differs in %s: the table has %s, a fold of the log has %s: run spool rebuild", e.Table, strings.Join(e.Columns, ", "), truncate.Text(e.Live, 400), truncate.Text(e.Rebuilt, 400))
}

// compareWithLive folds the log up to the present checkpoints of the live read models, compares the live tables with
// the folded ones, and returns the number of compared rows. It reads the live tables in a snapshot of Postgres, so that
// live projection can continue.
func (b *rebuild) compareWithLive(ctx context.Context) (rows uint64, err error) {
	other, err := readmodel.Connect(ctx, b.p.cfg.DatabaseURL, readmodel.ShadowSchema)
	if err != nil {
		return 0, fmt.Errorf("connect to postgres: %w", err)
	}
	defer func() { _ = other.Close(context.WithoutCancel(ctx)) }()
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, b.conn, snapshot, func(tx pgx.Tx) error {
		target, err := readLiveCheckpoints(ctx, tx, len(b.groups), "")
		if err != nil {
			return err
		}
		if err := b.foldUpTo(ctx, target); err != nil {
			return err
		}
		if err := b.createDeferredIndexes(ctx); err != nil {
			return err
		}
		for n, g := range b.groups {
			// If the commits at the position differ, or the log is shorter, no rows need to be compared.
			if have := g.checkpoint; have.Position != target[n].Position || have.CommitID != target[n].CommitID {
				return &DifferenceError{
					Table: readmodel.TableCheckpoints, Columns: []string{"position", "commit_id"},
					Live: fmt.Sprintf(`{"grp":%d,"position":%d,"commit_id":%q}`, n, target[n].Position, target[n].CommitID), Rebuilt: fmt.Sprintf(`{"grp":%d,"position":%d,"commit_id":%q}`, n, have.Position, have.CommitID),
				}
			}
		}
		for _, t := range rebuiltTables {
			n, err := compareTable(ctx, tx, other, t.table, t.key)
			rows += n
			if err != nil {
				return err
			}
		}
		return nil
	})
	return rows, err
}

// compareTable compares a table in the live schema with the same table in the rebuilt schema, row by row in the order
// of the key. It returns the number of rows, or a *DifferenceError for the first row that differs.
func compareTable(ctx context.Context, live pgx.Tx, rebuilt *pgx.Conn, table, key string) (n uint64, err error) {
	sql := "SELECT row_to_json(t)::text FROM %s." + table + " t ORDER BY " + key
	a, err := live.Query(ctx, fmt.Sprintf(sql, readmodel.Schema))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", table, err)
	}
	defer a.Close()
	b, err := rebuilt.Query(ctx, fmt.Sprintf(sql, readmodel.ShadowSchema))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", table, err)
	}
	defer b.Close()
	for {
		x, y := nextRowJSON(a), nextRowJSON(b)
		if x == nil && y == nil {
			break
		}
		n++
		if !bytes.Equal(x, y) && !equalUsageRows(table, x, y) {
			if err := firstError(a, b); err != nil {
				return n, fmt.Errorf("read %s: %w", table, err)
			}
			return n, describeDifference(table, key, x, y)
		}
	}
	if err := firstError(a, b); err != nil {
		return n, fmt.Errorf("read %s: %w", table, err)
	}
	return n, nil
}

// equalUsageRows reports whether two rows of tenant_usage differ only in the rounding of their dollars. Rounding
// differs because a fold adds the usage of an erased session as one number, and that of other sessions in many
// additions.
func equalUsageRows(table string, live, rebuilt []byte) bool {
	if table != readmodel.TableTenantUsage || live == nil || rebuilt == nil {
		return false
	}
	var x, y map[string]any
	if json.Unmarshal(live, &x) != nil || json.Unmarshal(rebuilt, &y) != nil {
		return false // describeDifference reports it
	}
	const cost = "cost_usd"
	a, ok := x[cost].(float64)
	b, ok2 := y[cost].(float64)
	if !ok || !ok2 || math.Abs(a-b) > 1e-9*max(1, math.Abs(a), math.Abs(b)) {
		return false
	}
	delete(x, cost)
	delete(y, cost)
	return maps.Equal(x, y)
}

// nextRowJSON returns the JSON of the next row, or nil after the last row or an error. The result is valid until the
// next call.
func nextRowJSON(rows pgx.Rows) []byte {
	if !rows.Next() {
		return nil
	}
	return rows.RawValues()[0]
}

// firstError returns the first error of the results in list. Results that were not read to the end have no error.
func firstError(list ...pgx.Rows) error {
	for _, rows := range list {
		if err := rows.Err(); err != nil {
			return err
		}
	}
	return nil
}

// describeDifference returns a *DifferenceError with the columns in which two rows differ or, if their keys differ,
// with the key of the row that one schema lacks.
func describeDifference(table, key string, live, rebuilt []byte) error {
	d := &DifferenceError{Table: table, Live: string(live), Rebuilt: string(rebuilt)}
	if live == nil || rebuilt == nil {
		return d
	}
	var x, y map[string]json.RawMessage
	if err := json.Unmarshal(live, &x); err != nil {
		return fmt.Errorf("decode row of %s: %w", table, err)
	}
	if err := json.Unmarshal(rebuilt, &y); err != nil {
		return fmt.Errorf("decode row of %s: %w", table, err)
	}
	for column, value := range x {
		if !bytes.Equal(value, y[column]) {
			d.Columns = append(d.Columns, column)
		}
	}
	slices.Sort(d.Columns)
	return d
}
