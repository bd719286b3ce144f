// Package row is the output format of all benchmarks: one JSON object per line, which the collector formats into
// docs/performance.md.
package row

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// Row is one row of the table in docs/performance.md: a measurement and, if there is one, its target.
type Row struct {
	What     string  `json:"what"`
	Target   string  `json:"target"`            // as the design states it; "" for a row that only informs
	Measured string  `json:"measured"`          // with its unit
	Against  string  `json:"against,omitempty"` // what the ratio is to, measured in the same run
	Ratio    float64 `json:"ratio,omitempty"`   // measured over against; 0 for none
	P50Ms    float64 `json:"p50Ms,omitempty"`   // milliseconds
	P99Ms    float64 `json:"p99Ms,omitempty"`   // milliseconds
	OK       bool    `json:"ok"`                // the target is reached; false without one
	Command  string  `json:"command,omitempty"` // that measures it again
	Note     string  `json:"note,omitempty"`
}

// Verdict returns "ok" if the target of the row is reached, "short" if it is not, and "for information" if the row has
// no target.
func (r Row) Verdict() string {
	switch {
	case r.Target == "":
		return "for information"
	case r.OK:
		return "ok"
	}
	return "short"
}

// Write writes a row to w, as a line of JSON.
func Write(w io.Writer, r Row) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false) // commands have && in them
	if err := enc.Encode(r); err != nil {
		return fmt.Errorf("write row %q: %w", r.What, err)
	}
	return nil
}

// Read reads rows, one JSON object a line, to the end of r. The error names the line that is not a row.
func Read(r io.Reader) ([]Row, error) {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	var rows []Row
	for {
		var row Row
		err := dec.Decode(&row)
		if err == io.EOF {
			return rows, nil
		}
		if err != nil {
			return nil, fmt.Errorf("row %d: %w", len(rows)+1, err)
		}
		if row.What == "" {
			return nil, fmt.Errorf("row %d has no name", len(rows)+1)
		}
		rows = append(rows, row)
	}
}

// WriteTable writes rows as a Markdown table, as in docs/performance.md.
func WriteTable(w io.Writer, rows []Row) error {
	out := "| what | must reach | measured | against | ratio | p50 | p99 | |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
	for _, r := range rows {
		note := r.Verdict()
		if r.Note != "" {
			note += "; " + r.Note
		}
		out += fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s | %s |\n", r.What, r.Target, r.Measured, r.Against,
			formatNonZero(r.Ratio, "%.2f"), formatNonZero(r.P50Ms, "%.2f ms"), formatNonZero(r.P99Ms, "%.2f ms"), note)
	}
	_, err := io.WriteString(w, out)
	return err
}

// formatNonZero formats a number for a cell of the table, or returns "" for 0.
func formatNonZero(n float64, format string) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(format, n)
}

// Percentile returns the duration, in milliseconds, below which the given share (0 to 1) of the samples lies, or 0 if
// there are no samples. It sorts samples.
func Percentile(samples []time.Duration, share float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	slices.Sort(samples)
	i := min(int(share*float64(len(samples))), len(samples)-1)
	return float64(samples[i].Microseconds()) / 1000
}
