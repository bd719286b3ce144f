package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/bench/row"
)

func TestCollect(t *testing.T) {
	t.Parallel()
	rows := func() *bytes.Buffer {
		var in bytes.Buffer
		for _, r := range []row.Row{{What: "a", Target: "1 s", OK: true, Command: "go run a"}, {What: "b", Target: "1 s", Command: "go run a"}} {
			if err := row.Write(&in, r); err != nil {
				t.Fatal(err)
			}
		}
		return &in
	}
	file := filepath.Join(t.TempDir(), "performance.md")
	var out bytes.Buffer
	if err := run([]string{file}, rows(), &out); err != nil {
		t.Fatal(err)
	}
	if out.Len() != 0 {
		t.Errorf("it printed %s", out.String())
	}
	if err := run(nil, rows(), &out); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(page, out.Bytes()) {
		t.Error("the file is not what is printed")
	}
	for _, want := range []string{"| a |", "| ok |", "| short |", "cores"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page has no %q:\n%s", want, page)
		}
	}
	if n := strings.Count(string(page), "go run a"); n != 1 {
		t.Errorf("the command stands there %d times", n)
	}
	for what, in := range map[string]string{"nothing": "", "no rows": "PASS\n"} {
		if err := run(nil, strings.NewReader(in), &out); err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
	if err := run([]string{"a", "b"}, rows(), &out); err == nil {
		t.Error("two files were accepted")
	}
}
