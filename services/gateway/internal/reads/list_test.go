package reads

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// node is a node of a plan that was executed.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Recheck  float64 `json:"Rows Removed by Index Recheck"`
	Plans    []node  `json:"Plans"`
}

// visited returns the number of table rows that a plan read.
func (n node) visited() (rows float64) {
	if n.Relation != "" {
		rows = (n.Rows + n.Filtered + n.Recheck) * n.Loops
	}
	for _, p := range n.Plans {
		rows += p.visited()
	}
	return rows
}

func (n node) scansAll() bool {
	if n.Type == "Seq Scan" && n.Relation != "" {
		return true
	}
	for _, p := range n.Plans {
		if p.scansAll() {
			return true
		}
	}
	return false
}

// TestStatement_ReadsFewRowsOfALargeTenant tests that a page of a tenant with 100,000 sessions and executions, in tables
// with other tenants, reads few rows beyond its own.
func TestStatement_ReadsFewRowsOfALargeTenant(t *testing.T) {
	t.Parallel()
	url := pgtest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	pool, err := readmodel.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, sql := range []string{
		`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, metadata, created_at, updated_at, tip, tip_position, agent_ref, title, phase, open_approvals)
			SELECT t, 'ses_' || lpad(n::text, 26, '0'), 0, CASE WHEN n % 5000 = 0 THEN 'open' ELSE 'closed' END,
			       CASE WHEN n % 2500 = 0 THEN 'rare' ELSE 'common' END, '1', CASE WHEN n % 4000 = 0 THEN 'codex' ELSE 'spool' END, 'local', '{}',
			       '{"team":"t' || n % 3 || '","ticket":' || n || '}', '2026-01-01'::timestamptz + n * interval '1 minute',
			       '2026-06-01'::timestamptz + (n * 7919 % 100000) * interval '1 minute', 1, '0-1',
			       CASE WHEN n % 2500 = 0 THEN 'rare@' ELSE 'common@' END || repeat('a', 64), 'question ' || n,
			       CASE WHEN n % 5000 = 0 THEN 'running' WHEN n % 3 = 0 THEN 'failed' ELSE 'idle' END, CASE WHEN n % 5000 = 0 THEN 1 ELSE 0 END
			  FROM unnest(ARRAY['a', 'b']) t, generate_series(1, 100000) n WHERE t = 'a' OR n <= 20000`,
		`INSERT INTO executions (tenant, session, id, ord, phase, metadata, queued_at, dispatched_at, ended_at, first_seq, query)
			SELECT tenant, id, 'exe' || substr(id, 4), 0, CASE WHEN substr(id, 25)::int % 4000 = 0 THEN 'running' ELSE 'completed' END, metadata,
			       created_at, created_at, created_at + interval '1 hour', 2, title
			  FROM sessions`,
		"ANALYZE sessions", "ANALYZE executions",
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	value := func(s string) *string { return &s }
	yes, no := true, false
	later := time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)
	for name, f := range map[string]Filter{
		"all":                         {},
		"oldest first":                {Order: "asc"},
		"by updated":                  {Sort: "updated"},
		"by updated, oldest first":    {Sort: "updated", Order: "asc"},
		"a rare state":                {State: "rare"},
		"a rare phase":                {Phases: []string{"running"}},
		"a common phase":              {Phases: []string{"failed"}},
		"rare phases":                 {Phases: []string{"queued", "running", "waiting_for_approval"}},
		"common phases":               {Phases: []string{"failed", "idle"}},
		"open approvals":              {HasOpenApprovals: &yes},
		"no open approvals":           {HasOpenApprovals: &no},
		"a rare agent":                {Agent: "rare"},
		"a common agent":              {Agent: "common"},
		"a rare architecture":         {Architecture: "codex"},
		"a common architecture":       {Architecture: "spool"},
		"one value of the metadata":   {MetadataKey: "ticket", MetadataValue: value("77777")},
		"a third of the metadata":     {MetadataKey: "team", MetadataValue: value("t1")},
		"a member that all have":      {MetadataKey: "team"},
		"a member that none has":      {MetadataKey: "none"},
		"an hour of January":          {CreatedAfter: "2026-01-05T00:00:00Z", CreatedBefore: "2026-01-05T01:00:00Z"},
		"a day of changes":            {UpdatedAfter: "2026-06-05T00:00:00Z", UpdatedBefore: "2026-06-05T01:00:00Z", Sort: "updated"},
		"an agent in a range of time": {Agent: "common", CreatedAfter: "2026-02-01T00:00:00Z", CreatedBefore: "2026-02-01T06:00:00Z"},
	} {
		for _, l := range []listTable{sessionTable(), executionTable()} {
			if l.name == "executions" && (f.Phases != nil || f.HasOpenApprovals != nil) {
				continue
			}
			f := f
			if f.State != "" {
				f.State = map[string]string{"sessions": "open", "executions": "running"}[l.name]
			}
			id := "ses_" + strings.Repeat("0", 21) + "44640"
			if l.name == "executions" {
				id = "exe_" + id[4:]
			}
			for where, token := range map[string]string{"first page": "", "page in the middle": l.encodeToken(f, pagePosition{later, id})} {
				sql, args, err := l.pageStatement("a", f, token, 50)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				var text string
				err = pool.QueryRow(t.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args...).Scan(&text)
				if err != nil {
					t.Fatalf("%s of %s, %s: %v", where, l.name, name, err)
				}
				var plans []struct{ Plan node }
				if err := json.Unmarshal([]byte(text), &plans); err != nil {
					t.Fatal(err)
				}
				if plan := plans[0].Plan; plan.scansAll() || plan.visited() > 2000 {
					t.Errorf("%s of %s, %s: %.0f rows were read: %s", where, l.name, name, plan.visited(), text)
				}
			}
		}
	}
}
