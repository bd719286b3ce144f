package command

import (
	"fmt"
	"iter"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// printList prints items as a table with the header head, or as one JSON object per line. row returns the columns of an
// item. It prints at most limit items; 0 means all.
func printList[T any](a *app, asJSON bool, limit int, items iter.Seq2[client.APIObject[T], error], head []any, row func(T) []any) error {
	table := newTable(a)
	n := 0
	for d, err := range items {
		if err != nil {
			return err
		}
		if limit > 0 && n == limit {
			if !asJSON {
				defer terminal.Fprintf(a.Err, "only the first %d are shown; --limit 0 shows all\n", limit)
			}
			break
		}
		if asJSON {
			if err := a.printJSON(d); err != nil {
				return err
			}
		} else {
			if n == 0 {
				writeTableRow(table, head)
			}
			writeTableRow(table, row(d.Value))
		}
		n++
	}
	return table.Flush()
}

// newTable returns a writer that aligns columns and writes to the app's output.
func newTable(a *app) *tabwriter.Writer { return tabwriter.NewWriter(a.Out, 0, 8, 2, ' ', 0) }

// writeTableRow writes one row of a table. It makes the texts of the columns safe for a terminal, because they may come
// from an untrusted source.
func writeTableRow(w *tabwriter.Writer, row []any) {
	for i, c := range row {
		if i > 0 {
			fmt.Fprint(w, "\t")
		}
		text := terminal.SafeLine(fmt.Sprint(c))
		if text == "" {
			text = "-"
		}
		fmt.Fprint(w, text)
	}
	fmt.Fprintln(w)
}

// printFields prints rows of columns, such as names with their values.
func printFields(a *app, rows ...[]any) error {
	table := newTable(a)
	for _, r := range rows {
		writeTableRow(table, r)
	}
	return table.Flush()
}

// formatTime formats a time for people, in the local time zone. It returns "" for nil.
func formatTime(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return formatLocalTime(t.AsTime())
}

// formatLocalTime formats a time for people, in the local time zone.
func formatLocalTime(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05") }

// formatExactTime formats a time as the API does. It returns "" for nil.
func formatExactTime(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Format(time.RFC3339Nano)
}
