package row_test

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
)

func Example() {
	rows := []row.Row{
		{What: "append", Target: "80 %", Measured: "900/s", Against: "1,000/s raw", Ratio: 0.9, P50Ms: 1, P99Ms: 2.5, OK: true},
		{What: "restore", Target: "1 s", Measured: "2 s"},
		{What: "snapshot", Measured: "3 s", Note: "of all"},
	}
	if err := row.WriteTable(os.Stdout, rows); err != nil {
		panic(err)
	}
	// Output:
	// | what | must reach | measured | against | ratio | p50 | p99 | |
	// | --- | --- | --- | --- | --- | --- | --- | --- |
	// | append | 80 % | 900/s | 1,000/s raw | 0.90 | 1.00 ms | 2.50 ms | ok |
	// | restore | 1 s | 2 s |  |  |  |  | short |
	// | snapshot |  | 3 s |  |  |  |  | for information; of all |
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	want := []row.Row{{What: "a", OK: true, Note: "n"}, {What: "b", Ratio: 0.5}}
	var b bytes.Buffer
	for _, r := range want {
		if err := row.Write(&b, r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := row.Read(&b)
	if err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("read %+v, %v", got, err)
	}
	for _, bad := range []string{"PASS", `{"ok":true}`, `{"what":"a","surprise":1}`} {
		if _, err := row.Read(strings.NewReader(bad)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	var samples []time.Duration
	for i := 100; i > 0; i-- {
		samples = append(samples, time.Duration(i)*time.Millisecond)
	}
	if p50, p99 := row.Percentile(samples, 0.5), row.Percentile(samples, 0.99); p50 != 51 || p99 != 100 {
		t.Errorf("p50 is %v, p99 is %v", p50, p99)
	}
	if row.Percentile(nil, 0.5) != 0 {
		t.Error("no samples have a percentile")
	}
}
