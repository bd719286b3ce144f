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

// testEvent is a line of the output of `go test -json`; see `go doc test2json`.
type testEvent struct {
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
	s := newTestSummary(os.Stdout)
	if *list != "" {
		var err error
		if s.expected, err = loadExpectedSkips(*list); err != nil {
			fmt.Fprintln(os.Stderr, "testsum:", err)
			os.Exit(1)
		}
	}
	if err := s.readEvents(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	if !s.printTotals(*strict) {
		os.Exit(1)
	}
}

// expectedSkip describes skipped tests that are no failure: a package, and a pattern that matches "test: reason".
type expectedSkip struct {
	pkg  string
	skip *regexp.Regexp
}

// loadExpectedSkips reads the expected skips from a file: on each line a package and a regular expression.
func loadExpectedSkips(path string) ([]expectedSkip, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []expectedSkip
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
		list = append(list, expectedSkip{pkg, skip})
	}
	return list, nil
}

// testKey identifies a test, or a package if test is "".
type testKey struct{ pkg, test string }

// testSummary counts the results of tests and prints the output of failed ones.
type testSummary struct {
	out                     io.Writer
	output                  map[testKey][]string // output of tests that have not ended, and of packages
	failures                map[string]int       // failed tests by package
	skips                   []string
	expected                []expectedSkip
	unexpected              int
	passed, failed, skipped int
}

func newTestSummary(out io.Writer) *testSummary {
	return &testSummary{out: out, output: map[testKey][]string{}, failures: map[string]int{}}
}

// readEvents reads the output of `go test -json` to its end.
func (s *testSummary) readEvents(r io.Reader) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if len(strings.TrimSpace(line)) > 0 {
			var e testEvent
			if jerr := json.Unmarshal([]byte(line), &e); jerr != nil {
				// go prints some failures of its own as plain text.
				s.printText(line)
			} else {
				s.addEvent(e)
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

// addEvent processes one line of the output of `go test -json`.
func (s *testSummary) addEvent(e testEvent) {
	k := testKey{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		s.printText(e.Output)
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

// endTest counts a test that has ended, and prints its output if it failed.
func (s *testSummary) endTest(e testEvent) {
	lines := s.output[testKey{e.Package, e.Test}]
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.failures[e.Package]++
		s.printText(strings.Join(lines, ""))
	case "skip":
		s.skipped++
		reported := e.Test + ": " + skipReason(lines)
		note := ""
		if slices.ContainsFunc(s.expected, func(x expectedSkip) bool { return x.pkg == e.Package && x.skip.MatchString(reported) }) {
			note = " (expected)"
		} else {
			s.unexpected++
		}
		s.skips = append(s.skips, e.Package+" "+reported+note)
	}
}

// endPackage prints the result of a package, and the output of its unfinished tests, which explains a panic or a
// timeout.
func (s *testSummary) endPackage(e testEvent) {
	for k, lines := range s.output {
		if k.pkg != e.Package || k.test == "" {
			continue
		}
		if e.Action == "fail" {
			s.failed++
			s.failures[e.Package]++
			s.printText(strings.Join(lines, ""))
		}
		delete(s.output, k)
	}
	if e.Action == "fail" && s.failures[e.Package] == 0 {
		s.failed++ // the package did not build, or failed outside its tests
	}
	own := s.output[testKey{e.Package, ""}]
	delete(s.output, testKey{e.Package, ""})
	for i, line := range own {
		// For a passed package only go's closing line matters.
		if e.Action == "fail" && line != "PASS\n" || i == len(own)-1 {
			s.printText(line)
		}
	}
	if e.FailedBuild != "" && len(own) == 0 {
		s.printText("FAIL\t" + e.Package + " [build failed]\n")
	}
}

// printTotals prints the skipped tests and the numbers of tests, and reports whether the run succeeded. With strict, a
// skip that is not expected is a failure.
func (s *testSummary) printTotals(strict bool) bool {
	ok := s.failed == 0
	if len(s.skips) > 0 {
		s.printText("\nskipped:\n")
		for _, skip := range s.skips {
			s.printText("  " + skip + "\n")
		}
	}
	if strict && s.unexpected > 0 {
		s.printText(fmt.Sprintf("%d of them are not expected: install what the reasons name\n", s.unexpected))
		ok = false
	}
	if s.passed+s.failed+s.skipped == 0 {
		s.printText("no test has run\n")
		ok = false
	}
	s.printText(fmt.Sprintf("\n%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped))
	return ok
}

// printText writes text to the output, and ends the program if that fails.
func (s *testSummary) printText(text string) {
	if _, err := io.WriteString(s.out, text); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
}

// skipReason returns the message with which a test was skipped, from the lines that it printed.
func skipReason(lines []string) string {
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
