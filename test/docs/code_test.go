package docs

import (
	"regexp"
	"strings"
	"testing"
)

// TestPages_ShowCodeThatIsTested tests that every block of Go in the recipes is part of a file that the tests compile and
// run: the file whose path the text before the block names last.
func TestPages_ShowCodeThatIsTested(t *testing.T) {
	t.Parallel()
	source := regexp.MustCompile("`([\\w./-]+/\\w+_test\\.go)`")
	for page, want := range map[string]int{"CONTRIBUTING.md": 1, "docs/adding-an-agent.md": 2} {
		parts := strings.Split(read(t, page), "```go\n")
		if len(parts)-1 < want {
			t.Errorf("%s has %d blocks of Go, want at least %d", page, len(parts)-1, want)
		}
		before := parts[0]
		for _, part := range parts[1:] {
			block, after, _ := strings.Cut(part, "```\n")
			named := source.FindAllStringSubmatch(before, -1)
			if len(named) == 0 {
				t.Errorf("%s: the text before a block of Go names no test file:\n%s", page, block)
			} else if path := named[len(named)-1][1]; !strings.Contains(read(t, path), block) {
				t.Errorf("%s: this block is not part of %s:\n%s", page, path, block)
			}
			before = after
		}
	}
}
