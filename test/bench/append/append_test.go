package append

import (
	"bytes"
	"testing"
	"time"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// TestMeasure_ReportsAllRows measures too briefly for meaningful figures.
func TestMeasure_ReportsAllRows(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	m := &Benchmark{Sessions: []harness.PositiveCount{1, 8}, Writers: 40, Rounds: 2, Each: 50 * time.Millisecond}
	if err := harness.Run(t.Context(), "append", m, t.TempDir(), &out, t.Output()); err != nil {
		t.Fatal(err)
	}
	rows, err := row.Read(&out)
	if err != nil || len(rows) != 4 {
		t.Fatalf("rows are %+v, %v", rows, err)
	}
	if r := rows[2]; r.Ratio <= 0 || r.P99Ms < r.P50Ms || r.P50Ms <= 0 {
		t.Errorf("the row of batches is %+v", r)
	}
	if r := rows[3]; r.Ratio <= 0 || r.OK != (r.Ratio <= maxVersion2CPURatio) {
		t.Errorf("the row of versions is %+v", r)
	}
	for _, r := range rows[:2] {
		if r.Ratio <= 0 || r.P50Ms <= 0 || r.P99Ms < r.P50Ms || r.OK != (r.Ratio >= minShareOfRawRate) {
			t.Errorf("row is %+v", r)
		}
	}
}
