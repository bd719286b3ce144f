package projector_test

import (
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// schemaQueries select what the catalogue of Postgres says about the tables, columns, indexes, constraints and functions of
// a schema.
var schemaQueries = []string{
	`SELECT 'table', c.relname, c.relkind, c.relpersistence, c.relreplident, c.reloptions, c.relacl, c.relhasindex FROM pg_class c WHERE c.relnamespace = 'spool'::regnamespace AND c.relkind IN ('r', 'v', 'S')`,
	`SELECT 'column', c.relname, c.relkind, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated, a.attstorage, a.attcompression, a.attstattarget, a.attacl, a.attcollation, pg_get_expr(d.adbin, d.adrelid)
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum WHERE c.relnamespace = 'spool'::regnamespace AND NOT a.attisdropped`,
	`SELECT 'index', i.relname, i.reloptions, i.relpersistence, pg_get_indexdef(i.oid), x.indisvalid, x.indisready, x.indislive, x.indisprimary, x.indisunique, x.indimmediate, x.indisreplident, x.indisclustered
		FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid WHERE i.relnamespace = 'spool'::regnamespace`,
	`SELECT 'constraint', conrelid::regclass, conname, contype, convalidated, condeferrable, conindid::regclass, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'spool'::regnamespace`,
	`SELECT 'function', p.proname, p.proacl, p.proowner, pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = 'spool'::regnamespace`,
}

// schema returns the definitions of the live schema.
func (w *world) schema() string {
	w.t.Helper()
	conn := w.conn()
	var out []string
	for _, sql := range schemaQueries {
		rows, err := conn.Query(w.t.Context(), "SELECT t::text FROM ("+sql+") t ORDER BY 1")
		if err != nil {
			w.t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			w.t.Fatal(err)
		}
		out = append(out, lines...)
	}
	return strings.Join(out, "\n")
}

// differingLines returns the lines that only one of two texts has.
func differingLines(a, b string) string {
	count := map[string]int{}
	for _, l := range strings.Split(a, "\n") {
		count[l]++
	}
	for _, l := range strings.Split(b, "\n") {
		count[l]--
	}
	var out []string
	for l, n := range count {
		if n != 0 {
			out = append(out, fmt.Sprintf("%+d %s", -n, l))
		}
	}
	return strings.Join(out, "\n")
}

// checkSchema checks that the live schema is the one that the migrations created.
func (w *world) checkSchema(migrated string) {
	w.t.Helper()
	if got := w.schema(); got != migrated {
		w.t.Errorf("the schema differs from the one of the migrations:\n%s", differingLines(migrated, got))
	}
	if n := queryOne[int](w, "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'spool\\_%'"); n != 0 {
		w.t.Errorf("%d schemas are left over", n)
	}
}

// TestRebuild_LeavesTheSchemaOfTheMigrations also retires a session, whose events are found by their key in the middle of the
// fold.
func TestRebuild_LeavesTheSchemaOfTheMigrations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.migrate()
	migrated := w.schema()
	if !strings.Contains(migrated, "events_pkey") || !strings.Contains(migrated, "blocks_shown") {
		t.Fatal("the schema lacks indexes")
	}
	w.start()
	var sessions []*session
	for range 5 {
		sessions = append(sessions, w.session(-1).create())
	}
	gone := sessions[0]
	for n, s := range sessions {
		s.turn(n)
	}
	gone.append(&gone.life, "", events.SessionDeleted{})
	gone.append(&gone.run, "", events.RunRetired{})
	for _, s := range sessions[1:] {
		s.turn(9)
	}
	w.awaitProjected(sessions...)
	before := w.dump()
	w.rebuild()
	w.checkSchema(migrated)
	if after := w.dump(); after != before {
		t.Errorf("a rebuild changes rows:\n%s", differingLines(before, after))
	}
	w.sameAsRebuilt()
}

// TestRebuild_KilledBeforeItsIndexes kills the process of a rebuild that has copied all rows and is about to create the
// first index.
func TestRebuild_KilledBeforeItsIndexes(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, 1, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})
	w.migrate()
	migrated := w.schema()
	w.start()
	var sessions []*session
	for n := range 4 {
		s := w.session(-1).create()
		s.turn(n)
		sessions = append(sessions, s)
	}
	w.awaitProjected(sessions...)
	before := w.dump()

	const gate = 4711 // advisory lock
	super, err := pgx.Connect(t.Context(), w.db.Superuser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = super.Close(t.Context()) })
	exec := func(sql string) {
		t.Helper()
		if _, err := super.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(fmt.Sprintf(`CREATE FUNCTION public.gate() RETURNS event_trigger LANGUAGE plpgsql AS $$
		DECLARE filled boolean := false;
		BEGIN
			IF to_regclass('spool_shadow.events') IS NOT NULL THEN
				EXECUTE 'SELECT count(*) > 0 FROM spool_shadow.events' INTO filled;
			END IF;
			IF filled THEN PERFORM pg_advisory_xact_lock(%d); END IF;
		END $$`, gate))
	exec("CREATE EVENT TRIGGER gate ON ddl_command_start WHEN TAG IN ('ALTER TABLE', 'CREATE INDEX') EXECUTE FUNCTION public.gate()")
	exec(fmt.Sprintf("SELECT pg_advisory_lock(%d)", gate))
	rebuilding := w.spawn(w.srv.ClientURL(), processRebuild)
	waiting := fmt.Sprintf("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %d AND NOT granted", gate)
	eventually(t, "the rebuild creates an index", func() error {
		if queryOne[int](w, waiting) == 0 {
			return errNotYet
		}
		return nil
	})
	if n := queryOne[int](w, "SELECT count(*) FROM pg_indexes WHERE schemaname = 'spool_shadow' AND tablename = 'events'"); n != 0 {
		t.Fatalf("the shadow of events has %d indexes already", n)
	}
	rebuilding.kill()
	if got := w.schema(); got != migrated {
		t.Errorf("the killed rebuild changed the live schema:\n%s", differingLines(migrated, got))
	}
	if after := w.dump(); after != before {
		t.Error("the killed rebuild changed live rows")
	}
	exec("DROP EVENT TRIGGER gate")
	exec(fmt.Sprintf("SELECT pg_advisory_unlock(%d)", gate))
	eventually(t, "Postgres ends the connections of the killed process", func() error {
		if queryOne[int](w, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = $1 AND objid = $2", 0x73706f6f, 0x6c726562) != 0 {
			return errNotYet
		}
		return nil
	})
	sessions[0].turn(100)
	w.awaitProjected(sessions...)
	before = w.dump()
	w.rebuild()
	w.checkSchema(migrated)
	if after := w.dump(); after != before {
		t.Errorf("the rebuild after a killed one changes rows:\n%s", differingLines(before, after))
	}
	w.sameAsRebuilt()
}

// TestRebuild_RowThatAnIndexRefuses tests that a row that only a deferred index refuses gives the same rows as live.
func TestRebuild_RowThatAnIndexRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	migrated := w.schema()
	w.start()
	name := fnv.New64()
	_, _ = name.Write([]byte(t.Name()))
	random := make([]byte, 8000) // does not compress below the maximum of an index row
	for i, r := 0, rand.New(rand.NewPCG(1, name.Sum64())); i < len(random); i++ {
		random[i] = byte(r.Uint32())
	}
	s := w.session(-1)
	s.append(&s.life, "", events.SessionCreated{Agent: hex.EncodeToString(random), AgentVersion: "1", Architecture: "spool", Provider: "local"})
	s.turn(1)
	w.awaitProjected(s)
	if n := queryOne[int](w, "SELECT count(*) FROM "+readmodel.TablePoison); n != 1 {
		t.Fatalf("%d commits are poison, want 1", n)
	}
	poisoned := "SELECT regexp_replace(reason, 'spool(_shadow)?', '') FROM " + readmodel.TablePoison
	live := queryOne[string](w, poisoned)
	w.rebuild()
	w.checkSchema(migrated)
	if got := queryOne[string](w, poisoned); got != live {
		t.Errorf("the rebuilt poison is %q, live %q", got, live)
	}
	w.sameAsRebuilt()
}
