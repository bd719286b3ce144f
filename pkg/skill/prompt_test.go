package skill_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/skill"
)

var update = flag.Bool("update", false, "write the golden files")

// TestPrompt_ListsSkillsWithinTheBudget tests the text, in full and when it exceeds the budget.
func TestPrompt_ListsSkillsWithinTheBudget(t *testing.T) {
	t.Parallel()
	doc := func(name, description, body string) string {
		return "---\nname: " + name + "\ndescription: " + description + "\n---\n" + body
	}
	list := []skill.PromptSkill{
		{"pdf-tools", "Reads and fills PDF forms.", "/bin/skills/1111", doc("pdf-tools", "Reads and fills PDF forms.", "\n# PDF\n\nRun scripts/fill.py.\n---\nMore.\n\n")},
		{"xls", "Makes\nspreadsheets. ", "/bin/skills/2222/", doc("xls", "x", "Use it.")},
		{"gone", "Its files are missing.", "", doc("gone", "x", "Read this.\n")},
	}
	for name, text := range map[string]string{
		"whole.golden": skill.FormatPrompt(list, 0),
		"short.golden": skill.FormatPrompt(list, len(skill.FormatPrompt(list, 0))-1),
	} {
		path := filepath.Join("testdata", name)
		if *update {
			must(t, os.WriteFile(path, []byte(text), 0o600))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if text != string(want) {
			t.Errorf("%s: got\n%s\nwant\n%s", name, text, want)
		}
	}
	if got := skill.FormatPrompt(nil, 0); got != "" {
		t.Errorf("the prompt without skills is %q", got)
	}
	if got := skill.FormatPrompt(list, len(skill.FormatPrompt(list, 0))); got != skill.FormatPrompt(list, 0) {
		t.Error("a text of exactly the budget is cut")
	}
	// With the default budget.
	list[0].Document = doc("x", "x", strings.Repeat("word ", skill.PromptBudget/5))
	if got := skill.FormatPrompt(list, 0); len(got) > 1000 || !strings.Contains(got, "read SKILL.md in its LOCATION") {
		t.Errorf("%d bytes: %.300s", len(got), got)
	}
}
