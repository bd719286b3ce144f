package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// errIndexRefused is returned if Postgres cannot create an index because of the content of a row.
var errIndexRefused = errors.New("postgres refuses a row in an index")

// deferredIndexes holds the statements that create the indexes of the shadow schema after its rows were copied, because
// sorting all rows once costs less than one insert into the index for each row. Only the shadow schema is ever without
// these indexes: a rebuild that ends early leaves the live schema as it is, and the next rebuild drops the shadow
// schema.
type deferredIndexes struct {
	conn   *pgx.Conn // connection to the shadow schema, used by one caller at a time
	logger *slog.Logger

	mu     sync.Mutex
	events []string // statements that create the primary key of events; nil if it exists
	others []string // statements that create the other indexes
}

// selectDeferredIndexes is the SQL query for the indexes that a fold does not need, with the statements that drop and
// create each index. The query leaves out primary keys, by which a fold looks rows up, and audit_by_subject, by which a
// fold deletes rows. It includes the primary key of the table events, which a fold needs rarely; see
// deferredIndexes.createForEvents.
const selectDeferredIndexes = `SELECT t.relname = $1,
	CASE WHEN k.oid IS NULL THEN format('DROP INDEX %I', i.relname) ELSE format('ALTER TABLE %I DROP CONSTRAINT %I', t.relname, k.conname) END,
	CASE WHEN k.oid IS NULL THEN pg_get_indexdef(i.oid) ELSE format('ALTER TABLE %I ADD CONSTRAINT %I %s', t.relname, k.conname, pg_get_constraintdef(k.oid)) END
	FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
	LEFT JOIN pg_constraint k ON k.conindid = i.oid AND k.conrelid = t.oid AND k.contype IN ('p', 'u', 'x')
	WHERE t.relnamespace = current_schema()::regnamespace AND t.relname <> $2
	AND (NOT x.indisunique AND i.relname <> 'audit_by_subject' OR t.relname = $1)
	ORDER BY x.indisprimary DESC, t.relname, i.relname`

// dropDeferredIndexes drops the indexes of the shadow schema that selectDeferredIndexes selects. The result creates
// them later.
func dropDeferredIndexes(ctx context.Context, url string, logger *slog.Logger) (*deferredIndexes, error) {
	conn, err := readmodel.Connect(ctx, url, readmodel.ShadowSchema)
	if err != nil {
		return nil, fmt.Errorf("connect to postgres: %w", err)
	}
	d := &deferredIndexes{conn: conn, logger: logger}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, selectDeferredIndexes, readmodel.TableEvents, readmodel.TableCheckpoints)
		if err != nil {
			return err
		}
		var ofEvents bool
		var drop, create string
		var drops []string
		_, err = pgx.ForEachRow(rows, []any{&ofEvents, &drop, &create}, func() error {
			drops = append(drops, drop)
			if ofEvents {
				d.events = append(d.events, create)
			} else {
				d.others = append(d.others, create)
			}
			return nil
		})
		for _, sql := range drops {
			if err == nil {
				_, err = tx.Exec(ctx, sql)
			}
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("drop the indexes of the shadow schema: %w", err), d.close(ctx))
	}
	return d, nil
}

// createForEvents creates the deferred indexes of the table events unless they exist. It is safe for concurrent use,
// but no caller may be in a transaction that has written to the table.
func (d *deferredIndexes) createForEvents(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.executeStatements(ctx, &d.events)
}

// createAll creates all deferred indexes that do not exist yet.
func (d *deferredIndexes) createAll(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.executeStatements(ctx, &d.events), d.executeStatements(ctx, &d.others))
}

// executeStatements executes the SQL statements of a list, and removes each statement from the list after it has
// succeeded.
func (d *deferredIndexes) executeStatements(ctx context.Context, list *[]string) error {
	for len(*list) > 0 {
		sql := (*list)[0]
		d.logger.Debug("create index", "statement", sql)
		if _, err := d.conn.Exec(ctx, sql); err != nil {
			var pg *pgconn.PgError
			if errors.As(err, &pg) && store.IsRowRefusal(pg) {
				err = fmt.Errorf("%w: %w", errIndexRefused, err)
			}
			return fmt.Errorf("%s: %w", sql, err)
		}
		*list = (*list)[1:]
	}
	return nil
}

// close closes the connection to Postgres.
func (d *deferredIndexes) close(ctx context.Context) error { return d.conn.Close(ctx) }
