package waiting_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/waiting"
)

// TestDescriptions_AreThoseOfTheDocuments tests that docs/waiting.md and the API definition have exactly the reasons of this package.
func TestDescriptions_AreThoseOfTheDocuments(t *testing.T) {
	t.Parallel()
	var rows, names []string
	for _, d := range waiting.Descriptions() {
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |", d.Reason, d.Meaning, d.Remedy))
		names = append(names, string(d.Reason))
		if got, ok := waiting.Describe(d.Reason); !ok || got != d {
			t.Errorf("Describe(%s): %+v, %v", d.Reason, got, ok)
		}
	}
	if !slices.IsSorted(names) {
		t.Errorf("not in alphabetical order: %q", names)
	}
	if _, ok := waiting.Describe("magic"); ok {
		t.Error("an unknown reason has a description")
	}
	page := read(t, "../../docs/waiting.md")
	if want := "| reason | meaning | what to do |\n| --- | --- | --- |\n" + strings.Join(rows, "\n") + "\n\n"; !strings.Contains(page, want) {
		t.Errorf("docs/waiting.md does not contain this table:\n%s", want)
	}
	if want := "  // One of: " + strings.Join(names, ", ") + ".\n"; !strings.Contains(read(t, "../api/spool/v1/spool.proto"), want) {
		t.Errorf("spool.proto does not contain the line %q", want)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
