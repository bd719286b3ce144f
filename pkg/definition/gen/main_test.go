package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestCurrent: what is committed is what would be generated.
func TestCurrent(t *testing.T) {
	t.Chdir("..") // where go generate runs it
	dir := t.TempDir()
	page, schema := filepath.Join(dir, "agents.md"), filepath.Join(dir, "schema.json")
	if err := run([]string{"../events", page, schema}); err != nil {
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

func TestUsage(t *testing.T) {
	t.Parallel()
	if err := run(nil); err == nil {
		t.Error("it wants no arguments")
	}
	if err := run([]string{"/nonsense", "/nonsense/page", "/nonsense/schema"}); err == nil {
		t.Error("it wrote nowhere")
	}
}
