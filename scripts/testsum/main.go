// Command testsum reads `go test -json` and prints a summary: the closing line of go test for each package, the
// output of failed tests, the reasons of skipped tests, and at the end a line "N passed, N failed, N skipped". It
// exits with 1 if anything failed and, with -strict, if a test was skipped that the file of -expected does not
// list.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

// event is a line of `go test -json`; see `go doc test2json`.
type event struct {
	Action      string
	Package     string
	Test        string
	Output      string
	ImportPath  string
	FailedBuild string
}

func main() {
	strict := flag.Bool("strict", false, "fail when a test was skipped that is not expected to be")
	list := flag.String("expected", "", "file of expected skips: on each line a package and a regular expression that matches `test: reason`")
	flag.Parse()
	s := newSummary(os.Stdout)
	if *list != "" {
		var err error
		if s.expected, err = loadExpected(*list); err != nil {
			fmt.Fprintln(os.Stderr, "testsum:", err)
			os.Exit(1)
		}
	}
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	if !s.finish(*strict) {
		os.Exit(1)
	}
}

// expectation is a skip that depends on the tested code and not on the machine.
type expectation struct {
	pkg  string
	skip *regexp.Regexp
}

func loadExpected(path string) ([]expectation, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []expectation
	for i, line := range strings.Split(string(b), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pkg, expr, found := strings.Cut(line, " ")
		if !found {
			return nil, fmt.Errorf("%s:%d: want a package and a regular expression", path, i+1)
		}
		skip, err := regexp.Compile(strings.TrimSpace(expr))
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, i+1, err)
		}
		list = append(list, expectation{pkg, skip})
	}
	return list, nil
}

type key struct{ pkg, test string }

type summary struct {
	out                     io.Writer
	output                  map[key][]string // output of tests that have not ended, and of packages
	failures                map[string]int   // failed tests by package
	skips                   []string
	expected                []expectation
	unexpected              int
	passed, failed, skipped int
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, output: map[key][]string{}, failures: map[string]int{}}
}

func (s *summary) read(r io.Reader) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if len(strings.TrimSpace(line)) > 0 {
			var e event
			if jerr := json.Unmarshal([]byte(line), &e); jerr != nil {
				// go prints some failures of its own as plain text.
				s.print(line)
			} else {
				s.add(e)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) add(e event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		s.print(e.Output)
	case "output":
		s.output[k] = append(s.output[k], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
			return
		}
		s.endTest(e)
		delete(s.output, k)
	}
}

func (s *summary) endTest(e event) {
	lines := s.output[key{e.Package, e.Test}]
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.failures[e.Package]++
		s.print(strings.Join(lines, ""))
	case "skip":
		s.skipped++
		reported := e.Test + ": " + reason(lines)
		note := ""
		if slices.ContainsFunc(s.expected, func(x expectation) bool { return x.pkg == e.Package && x.skip.MatchString(reported) }) {
			note = " (expected)"
		} else {
			s.unexpected++
		}
		s.skips = append(s.skips, e.Package+" "+reported+note)
	}
}

// endPackage prints the result of a package, and the output of its unfinished tests, which explains a panic or a
// timeout.
func (s *summary) endPackage(e event) {
	for k, lines := range s.output {
		if k.pkg != e.Package || k.test == "" {
			continue
		}
		if e.Action == "fail" {
			s.failed++
			s.failures[e.Package]++
			s.print(strings.Join(lines, ""))
		}
		delete(s.output, k)
	}
	if e.Action == "fail" && s.failures[e.Package] == 0 {
		s.failed++ // the package did not build, or failed outside its tests
	}
	own := s.output[key{e.Package, ""}]
	delete(s.output, key{e.Package, ""})
	for i, line := range own {
		// For a passed package only go's closing line matters.
		if e.Action == "fail" && line != "PASS\n" || i == len(own)-1 {
			s.print(line)
		}
	}
	if e.FailedBuild != "" && len(own) == 0 {
		s.print("FAIL\t" + e.Package + " [build failed]\n")
	}
}

// finish prints the totals and reports whether the run succeeded.
func (s *summary) finish(strict bool) bool {
	ok := s.failed == 0
	if len(s.skips) > 0 {
		s.print("\nskipped:\n")
		for _, skip := range s.skips {
			s.print("  " + skip + "\n")
		}
	}
	if strict && s.unexpected > 0 {
		s.print(fmt.Sprintf("%d of them are not expected: install what the reasons name\n", s.unexpected))
		ok = false
	}
	if s.passed+s.failed+s.skipped == 0 {
		s.print("no test has run\n")
		ok = false
	}
	s.print(fmt.Sprintf("\n%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped))
	return ok
}

func (s *summary) print(text string) {
	if _, err := io.WriteString(s.out, text); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
}

// reason returns the message of a skipped test, without go's own lines.
func reason(lines []string) string {
	var texts []string
	for _, line := range lines {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		texts = append(texts, line)
	}
	if len(texts) == 0 {
		return "no reason given"
	}
	return strings.Join(texts, " ")
}
