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

// writePage reads rows and writes the page that shows them to a file, or to out if file is "".
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
		time.Now().UTC().Format("2006-01-02"), machine(), runtime.Version())
	if err := row.Table(&b, rows); err != nil {
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

// machine returns the number of cores and, where the system reports them, the processor and the memory.
func machine() string {
	parts := []string{fmt.Sprintf("%d cores", runtime.NumCPU())}
	if v := field("/proc/cpuinfo", "model name"); v != "" {
		parts = append(parts, v)
	}
	if v := field("/proc/meminfo", "MemTotal"); v != "" {
		parts = append(parts, v+" of memory")
	}
	return strings.Join(append(parts, runtime.GOOS+"/"+runtime.GOARCH), ", ")
}

// field returns a value from a file of "name: value" lines, or "" if there is none.
func field(path, name string) string {
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
