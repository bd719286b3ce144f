package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
)

// writePage reads the rows that benchmarks have printed, one JSON object a line, from in. It writes
// docs/performance.md, a Markdown document with a table of the rows, to the path file, or to out if file is "".
func writePage(file string, in io.Reader, out io.Writer) error {
	rows, err := row.Read(in)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return errors.New("the input has no rows")
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- Written by `make bench`; do not edit. -->\n# Performance\n\nMeasured on %s, %s, %s.\n"+
		"Figures are ratios within one run wherever something can be compared. Rows marked \"short\" miss their target.\n\n",
		time.Now().UTC().Format("2006-01-02"), describeMachine(), runtime.Version())
	if err := row.WriteTable(&b, rows); err != nil {
		return err
	}
	var commands []string
	for _, r := range rows {
		if r.Command != "" && !slices.Contains(commands, r.Command) {
			commands = append(commands, r.Command)
		}
	}
	if len(commands) > 0 {
		fmt.Fprintf(&b, "\nThe commands that measured the rows, from the root of the repository:\n\n```sh\n%s\n```\n", strings.Join(commands, "\n"))
	}
	if file == "" {
		_, err := out.Write(b.Bytes())
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o644) //nolint:gosec // a document
}

// updatePage replaces rows of the table in file, which is docs/performance.md, by the rows that it reads from in, one
// JSON object a line. A row is identified by its first cell; a cell that begins with "the same" is identified together
// with the nearest cell above it that does not. Rows that the table does not have are added at its end. The last cell
// of every row from in gets the date of now.
func updatePage(file string, in io.Reader, now time.Time) error {
	rows, err := row.Read(in)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(file) //nolint:gosec // the page of the caller
	if err != nil {
		return err
	}
	fresh := map[string]string{}
	var order, commands []string
	var above string
	for _, r := range rows {
		if r.Note != "" {
			r.Note += "; "
		}
		r.Note += "measured on " + now.UTC().Format("2006-01-02")
		var b bytes.Buffer
		if err := row.WriteTable(&b, []row.Row{r}); err != nil {
			return err
		}
		lines := strings.Split(strings.TrimSpace(b.String()), "\n")
		name := rowName(lines[len(lines)-1], &above)
		if _, known := fresh[name]; !known {
			order = append(order, name)
		}
		fresh[name] = lines[len(lines)-1]
		commands = append(commands, r.Command)
	}
	var out []string
	above = ""
	inTable, inCommands := false, false
	add := func() { // at the end of the table
		for _, name := range order {
			if line, ok := fresh[name]; ok {
				out = append(out, line)
			}
		}
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(string(old), "\n"), "\n") {
		switch {
		case strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "| what |") && !strings.HasPrefix(line, "| --- |"):
			inTable = true
			name := rowName(line, &above)
			if replaced, ok := fresh[name]; ok {
				line = replaced
				delete(fresh, name)
			}
		case inTable:
			add()
			inTable = false
		case strings.HasPrefix(line, "```sh"):
			inCommands = true
		case inCommands && line == "```":
			for _, c := range commands {
				if c != "" && !slices.Contains(out, c) {
					out = append(out, c)
				}
			}
		}
		out = append(out, line)
	}
	return os.WriteFile(file, []byte(strings.Join(out, "\n")+"\n"), 0o644) //nolint:gosec // a document
}

// rowName returns the name that identifies a row of the Markdown table in docs/performance.md. line is the row; above
// is the first cell of the last row before it that did not begin with "the same".
func rowName(line string, above *string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
	if strings.HasPrefix(name, "the same") {
		return *above + ": " + name
	}
	*above = name
	return name
}

// describeMachine describes this machine for docs/performance.md: the number of cores, the operating system and, if the
// system reports them, the processor and the memory.
func describeMachine() string {
	parts := []string{fmt.Sprintf("%d cores", runtime.NumCPU())}
	if v := fieldOfFile("/proc/cpuinfo", "model name"); v != "" {
		parts = append(parts, v)
	}
	if v := fieldOfFile("/proc/meminfo", "MemTotal"); v != "" {
		parts = append(parts, v+" of memory")
	}
	return strings.Join(append(parts, runtime.GOOS+"/"+runtime.GOARCH), ", ")
}

// fieldOfFile returns the value with the given name from a file of "name: value" lines, or "" if the file has no such
// value.
func fieldOfFile(path, name string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
