package heads

import (
	"bytes"
	"testing"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// TestMeasure_ReportsTwoRows measures too briefly for meaningful figures.
func TestMeasure_ReportsTwoRows(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	m := &Benchmark{Rounds: 2, Sessions: 3, Commits: 4}
	if err := harness.Run(t.Context(), "heads", m, t.TempDir(), &out, t.Output()); err != nil {
		t.Fatal(err)
	}
	rows, err := row.Read(&out)
	if err != nil || len(rows) != 2 || rows[0].Ratio <= 0 || rows[1].Ratio <= 0 {
		t.Fatalf("rows are %+v, %v", rows, err)
	}
}
