package main

import (
	"bytes"
	"testing"

	"github.com/spoolhq/spool/test/bench/row"
)

// TestRun measures too briefly to mean anything, but all the way through.
func TestRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, t.TempDir(), 2, 3, 4); err != nil {
		t.Fatal(err)
	}
	rows, err := row.Read(&out)
	if err != nil || len(rows) != 1 || rows[0].Ratio <= 0 {
		t.Fatalf("rows are %+v, %v", rows, err)
	}
	if err := run(t.Context(), &out, t.TempDir(), 0, 1, 1); err == nil {
		t.Error("no rounds were accepted")
	}
}
