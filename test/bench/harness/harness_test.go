package harness_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// benchmark is a benchmark in a function.
type benchmark func(b *harness.Bench) error

func (m benchmark) Measure(_ context.Context, b *harness.Bench) error { return m(b) }

func TestRun_CleansUpInReverseOrderAlsoAfterError(t *testing.T) {
	t.Parallel()
	dir, errMeasure, errCleanup := t.TempDir(), errors.New("measure"), errors.New("clean up")
	var calls []string
	cleanup := func(name string, err error) func() error {
		return func() error { calls = append(calls, name); return err }
	}
	err := harness.Run(t.Context(), "name", benchmark(func(b *harness.Bench) error {
		b.Cleanup(cleanup("first", nil))
		err := b.RunPart("part", func(b *harness.Bench) error {
			b.Cleanup(cleanup("part", nil))
			return os.WriteFile(filepath.Join(b.Dir, "file"), nil, 0o600)
		})
		b.Cleanup(cleanup("second", errCleanup))
		return errors.Join(err, errMeasure)
	}), dir, t.Output(), t.Output())
	if !errors.Is(err, errMeasure) || !errors.Is(err, errCleanup) {
		t.Errorf("error %v, want those of the benchmark and of the cleanup", err)
	}
	if want := []string{"part", "second", "first"}; !slices.Equal(calls, want) {
		t.Errorf("cleanups ran in the order %v, want %v", calls, want)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

func TestReport_AddsCommandOfBenchmark(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := harness.Run(t.Context(), "name", benchmark(func(b *harness.Bench) error {
		return b.RunPart("part", func(b *harness.Bench) error {
			return errors.Join(b.ReportRow(row.Row{What: "a"}), b.ReportRow(row.Row{What: "b", Command: harness.ShellCommand("name --flag")}))
		})
	}), t.TempDir(), &out, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	rows, err := row.Read(&out)
	if err != nil || len(rows) != 2 || rows[0].Command != "cd test && go run ./bench name" || rows[1].Command != "cd test && go run ./bench name --flag" {
		t.Errorf("rows %+v, %v", rows, err)
	}
}

func TestMedian_OfOddAndEvenNumbers(t *testing.T) {
	t.Parallel()
	if odd, even := harness.Median([]float64{9, 1, 2}), harness.Median([]float64{4, 1, 9, 2}); odd != 2 || even != 3 {
		t.Errorf("medians %v and %v, want 2 and 3", odd, even)
	}
}
