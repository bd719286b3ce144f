package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
)

// TestRun measures too briefly to mean anything, but all the way through.
func TestRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, t.TempDir(), []int{1, 8}, 2, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	rows, err := row.Read(&out)
	if err != nil || len(rows) != 3 {
		t.Fatalf("rows are %+v, %v", rows, err)
	}
	if r := rows[2]; r.Ratio <= 0 || r.OK != (r.Ratio <= mostCPU) {
		t.Errorf("the row of versions is %+v", r)
	}
	for _, r := range rows[:2] {
		if r.Ratio <= 0 || r.P50Ms <= 0 || r.P99Ms < r.P50Ms || r.OK != (r.Ratio >= target) {
			t.Errorf("row is %+v", r)
		}
	}
	if err := run(t.Context(), &out, t.TempDir(), nil, 0, time.Second); err == nil {
		t.Error("no rounds were accepted")
	}
}
