// Command collect makes docs/performance.md of the rows on its standard input,
// or prints the page when no file is named.
//
//	go run ./bench/append | go run ./bench/collect ../docs/performance.md
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "collect:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	if len(args) > 1 {
		return fmt.Errorf("usage: collect [FILE] < rows")
	}
	rows, err := row.Read(in)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return fmt.Errorf("no rows on standard input")
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- Written by `make bench`; do not edit. -->\n# Performance\n\nMeasured on %s, %s, %s.\n"+
		"Figures are ratios within one run wherever something can be compared; \"short\" rows are those that miss their target.\n\n",
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
		fmt.Fprintf(&b, "\nMeasured again by:\n\n```\n%s\n```\n", strings.Join(commands, "\n"))
	}
	if len(args) == 0 {
		_, err := out.Write(b.Bytes())
		return err
	}
	return os.WriteFile(args[0], b.Bytes(), 0o644)
}

// machine is the number of cores and, where the system tells, the processor and the memory.
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

// field is a value in a file of "name: value" lines, "" where there is none.
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
