// Package store writes the rows of package fold to Postgres, together with the checkpoint of their group, and reads them.
package store

import (
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// column describes one column of a Postgres table whose rows are held in values of type R.
type column[R any] struct {
	name    string
	typ     string
	pointer func(*R) any   // pointer to the field, to scan into
	value   func(*R) any   // the field, for COPY
	array   func([]*R) any // the field of many rows, for unnest
}

// newColumn returns the column with a name. at returns a pointer to the field of R that holds the column's value; typ
// is Postgres's name of the column's type.
func newColumn[R, T any](name, typ string, at func(*R) *T) column[R] {
	return column[R]{
		name: name, typ: typ,
		pointer: func(r *R) any { return at(r) },
		value:   func(r *R) any { return *at(r) },
		array: func(rows []*R) any {
			list := make([]T, len(rows))
			for i, r := range rows {
				list[i] = *at(r)
			}
			return list
		},
	}
}

// table is a table of the read models, with the statements that read and write its rows.
type table[R any] struct {
	name    string
	keys    int // number of leading columns that are the primary key
	columns []column[R]
	names   []string
	insert  string // inserts rows; the arguments are those that columnArrays returns
	upsert  string // inserts rows, or replaces rows with the same keys; the arguments are those that columnArrays returns
	lookup  string // selects rows; the arguments are the key columns, each as an array
}

// newTable returns the table with a name, and its SQL statements. The first keys columns are the primary key.
func newTable[R any](name string, keys int, columns ...column[R]) table[R] {
	t := table[R]{name: name, keys: keys, columns: columns}
	var quoted, params, sets, on, keyNames []string
	for i, c := range columns {
		q := pgx.Identifier{c.name}.Sanitize()
		t.names = append(t.names, c.name)
		quoted = append(quoted, q)
		params = append(params, fmt.Sprintf("$%d::%s[]", i+1, c.typ))
		if i < keys {
			keyNames = append(keyNames, q)
			on = append(on, "t."+q+" = k."+q)
		} else {
			sets = append(sets, q+" = excluded."+q)
		}
	}
	all, key := strings.Join(quoted, ", "), strings.Join(keyNames, ", ")
	t.insert = fmt.Sprintf("INSERT INTO %s (%s) SELECT * FROM unnest(%s)", name, all, strings.Join(params, ", "))
	t.upsert = fmt.Sprintf("%s ON CONFLICT (%s) DO UPDATE SET %s", t.insert, key, strings.Join(sets, ", "))
	t.lookup = fmt.Sprintf("SELECT t.%s FROM unnest(%s) AS k(%s) JOIN %s t ON %s",
		strings.Join(quoted, ", t."), strings.Join(params[:keys], ", "), key, name, strings.Join(on, " AND "))
	return t
}

// columnArrays returns the arguments of the table's insert and upsert statements for rows: one array for each column.
func (t table[R]) columnArrays(rows []*R) []any {
	out := make([]any, len(t.columns))
	for i, c := range t.columns {
		out[i] = c.array(rows)
	}
	return out
}

// copySource returns rows as the source of a COPY into the table.
func (t table[R]) copySource(rows []*R) pgx.CopyFromSource {
	values := make([]any, len(t.columns)) // CopyFrom encodes each row before it asks for the next one
	return pgx.CopyFromSlice(len(rows), func(i int) ([]any, error) {
		for j, c := range t.columns {
			values[j] = c.value(rows[i])
		}
		return values, nil
	})
}

// scanRows decodes the rows of a query result, and closes the result.
func (t table[R]) scanRows(rows pgx.Rows) ([]R, error) {
	defer rows.Close()
	var out []R
	into := make([]any, len(t.columns))
	for rows.Next() {
		var r R
		for i, c := range t.columns {
			into[i] = c.pointer(&r)
		}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, rows.Err()
}

// readModelTables holds all tables of the read models.
type readModelTables struct {
	sessions      table[fold.Session]
	deleted       table[fold.DeletedSession]
	executions    table[fold.Execution]
	blocks        table[fold.Block]
	events        table[fold.Event]
	calls         table[fold.ToolCall]
	conversations table[fold.Conversation]
	approvals     table[fold.Approval]
	sandboxes     table[fold.Sandbox]
	files         table[fold.File]
	usage         table[fold.ModelUsage]
	keys          table[fold.APIKey]
	entries       table[fold.CatalogueEntry]
	versions      table[fold.CatalogueVersion]
	poison        table[fold.PoisonCommit]
	tenantUsage   table[fold.TenantUsage]
	tenantBudgets table[fold.TenantBudget]
	tenantLimits  table[fold.TenantLimits]
	audit         table[fold.AuditRow]
	states        table[fold.SavedSessionState]
}
