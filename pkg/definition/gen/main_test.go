package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestGeneratedFilesAreCurrent tests that the committed files equal the output of the generator.
func TestGeneratedFilesAreCurrent(t *testing.T) {
	t.Chdir("..") // go generate runs the generator in this folder
	dir := t.TempDir()
	page, schema := filepath.Join(dir, "agents.md"), filepath.Join(dir, "schema.json")
	if err := generate([]string{"../events", page, schema}); err != nil {
		t.Fatal(err)
	}
	for made, committed := range map[string]string{page: "../../docs/agents.md", schema: "../../docs/schema/spool.schema.json"} {
		got, err := os.ReadFile(made)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(committed)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is out of date: run go generate in pkg/definition", committed)
		}
	}
}

func TestRun_RefusesBadArguments(t *testing.T) {
	t.Parallel()
	if err := generate(nil); err == nil {
		t.Error("run without arguments returned no error")
	}
	if err := generate([]string{"/nonsense", "/nonsense/page", "/nonsense/schema"}); err == nil {
		t.Error("run with an invalid output path returned no error")
	}
}
