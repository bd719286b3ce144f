package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	pass  = `{"Action":"run","Package":"p","Test":"A"}` + "\n" + `{"Action":"output","Package":"p","Test":"A","Output":"noise\n"}` + "\n" + `{"Action":"pass","Package":"p","Test":"A"}` + "\n"
	ended = `{"Action":"output","Package":"p","Output":"PASS\n"}` + "\n" + `{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}` + "\n" + `{"Action":"pass","Package":"p"}` + "\n"
	skip  = `{"Action":"output","Package":"p","Test":"B","Output":"    b_test.go:1: no docker here\n"}` + "\n" + `{"Action":"skip","Package":"p","Test":"B"}` + "\n"
	fail  = `{"Action":"output","Package":"p","Test":"C","Output":"    c_test.go:1: broken\n"}` + "\n" + `{"Action":"fail","Package":"p","Test":"C"}` + "\n"
	lost  = `{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n"
	build = `{"ImportPath":"p","Action":"build-output","Output":"x.go:1: undefined: y\n"}` + "\n" + `{"ImportPath":"p","Action":"build-fail"}` + "\n" +
		`{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}` + "\n" + `{"Action":"fail","Package":"p","FailedBuild":"p"}` + "\n"
	hung   = `{"Action":"run","Package":"p","Test":"D"}` + "\n" + `{"Action":"output","Package":"p","Test":"D","Output":"panic: test timed out\n"}` + "\n"
	noTest = `{"Action":"output","Package":"q","Output":"?   \tq\t[no test files]\n"}` + "\n" + `{"Action":"skip","Package":"q"}` + "\n"
)

func TestSummary_CountsAndExplainsResults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		in     string
		strict bool
		ok     bool
		last   string
		has    []string
		hasNot []string
	}{
		"all pass":             {pass + ended, true, true, "1 passed, 0 failed, 0 skipped", []string{"ok  \tp\t0.1s\n"}, []string{"noise", "PASS"}},
		"a skip":               {pass + skip + ended, false, true, "1 passed, 0 failed, 1 skipped", []string{"p B: b_test.go:1: no docker here"}, nil},
		"a skip where none is": {pass + skip + ended, true, false, "1 passed, 0 failed, 1 skipped", []string{"1 of them are not expected"}, nil},
		"an expected skip":     {pass + strings.ReplaceAll(skip, "no docker here", "no order is promised") + ended, true, true, "1 passed, 0 failed, 1 skipped", []string{"no order is promised (expected)"}, nil},
		"a failure":            {pass + fail + lost, false, false, "1 passed, 1 failed, 0 skipped", []string{"c_test.go:1: broken", "FAIL\tp\t0.1s"}, []string{"noise"}},
		"outside the tests":    {pass + lost, false, false, "1 passed, 1 failed, 0 skipped", []string{"FAIL\tp\t0.1s"}, nil},
		"does not build":       {build, false, false, "0 passed, 1 failed, 0 skipped", []string{"undefined: y", "[build failed]"}, nil},
		"never ended":          {hung + lost, false, false, "0 passed, 1 failed, 0 skipped", []string{"panic: test timed out"}, nil},
		"plain text":           {"go: no such module\n" + pass + ended, false, true, "1 passed, 0 failed, 0 skipped", []string{"go: no such module"}, nil},
		"no tests in a folder": {noTest + pass + ended, true, true, "1 passed, 0 failed, 0 skipped", []string{"[no test files]"}, nil},
		"nothing ran":          {noTest, false, false, "0 passed, 0 failed, 0 skipped", []string{"no test has run"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			s := newTestSummary(&out)
			s.expected = []expectedSkip{{"p", regexp.MustCompile("^B: .* no order is promised$")}, {"other", regexp.MustCompile(".")}}
			if err := s.readEvents(strings.NewReader(c.in)); err != nil {
				t.Fatal(err)
			}
			if ok := s.printTotals(c.strict); ok != c.ok {
				t.Errorf("ok is %v, want %v", ok, c.ok)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := lines[len(lines)-1]; got != c.last {
				t.Errorf("the last line is %q, want %q", got, c.last)
			}
			for _, want := range c.has {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing in:\n%s", want, out.String())
				}
			}
			for _, not := range c.hasNot {
				if strings.Contains(out.String(), not) {
					t.Errorf("%q should not be in:\n%s", not, out.String())
				}
			}
		})
	}
}

func TestLoadExpected_NamesTheInvalidLine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "list")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# a comment\n\nexample.com/p ^TestX/.*: no order\n")
	list, err := loadExpectedSkips(path)
	if err != nil || len(list) != 1 || list[0].pkg != "example.com/p" || !list[0].skip.MatchString("TestX/a: no order") {
		t.Fatalf("got %v, %v", list, err)
	}
	for _, bad := range []string{"onlyapackage\n", "p (\n"} {
		write(bad)
		if _, err := loadExpectedSkips(path); err == nil || !strings.Contains(err.Error(), path+":1") {
			t.Errorf("%q: got %v", bad, err)
		}
	}
}
