package reads

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// TestRows_TimeoutExcludesTheCaller tests that a read does not fail if the caller takes longer than the timeout for a
// row, as on a busy machine, while rows are left that Postgres has not sent yet.
func TestRows_TimeoutExcludesTheCaller(t *testing.T) {
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
	const session, blocks = "ses_00000000000000000000000001", 8
	for _, sql := range []string{
		`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, created_at, updated_at, tip, tip_position)
			VALUES ('a', '` + session + `', 0, 'open', 'default', '1', 'spool', 'local', '{}', now(), now(), 9, '0-9')`,
		`INSERT INTO blocks (tenant, session, id, execution, conversation, kind, status, execution_ord, first_seq, last_seq, block)
			SELECT 'a', '` + session + `', n, 'e', 'main', 'assistant_text', 'complete', 0, n, n, '{"id":"' || n || '","content":"` + strings.Repeat("x", 700_000) + `"}'
			  FROM generate_series(1, 8) n`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	const timeout = 10 * time.Second
	s := New(pool, Config{Timeout: timeout})
	read := 0
	list, _, _, err := s.Blocks(t.Context(), "a", session, "", func(int64) error {
		if read++; read == 1 {
			time.Sleep(timeout)
		}
		return nil
	})
	if err != nil || len(list) != blocks {
		t.Errorf("%d blocks, %v", len(list), err)
	}
}
