package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// ignoredFiles are files that pages refer to and that git ignores. deploy/env creates them.
var ignoredFiles = []string{"deploy/.env", "deploy/egress.env"}

// TestPages_NameWhatExists checks every page. Decision records and the changelog describe the past: only their links
// are checked.
func TestPages_NameWhatExists(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile(root + "/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	checked := map[ReferenceKind]int{}
	for _, page := range files(t, ".md") {
		past := strings.HasPrefix(page, "docs/adr/") || page == "CHANGELOG.md"
		for _, r := range FindReferences(read(t, page)) {
			if past && r.Kind != KindLink {
				continue
			}
			checked[r.Kind]++
			if problem := missing(t, page, r, string(makefile), tests); problem != "" {
				t.Errorf("%s:%d: %s %q: %s", page, r.Line, r.Kind, r.Target, problem)
			}
		}
	}
	for kind, atLeast := range map[ReferenceKind]int{KindLink: 100, KindPath: 100, KindMakeTarget: 30, KindTestName: 50} {
		if checked[kind] < atLeast {
			t.Errorf("checked %d references of kind %s, want at least %d", checked[kind], kind, atLeast)
		}
	}
}

// missing describes what is wrong with a reference. It returns "" if nothing is.
func missing(t *testing.T, page string, r Reference, makefile string, tests []string) string {
	t.Helper()
	switch r.Kind {
	case KindMakeTarget:
		if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(r.Target) + `:`).MatchString(makefile) {
			return "the Makefile has no such target"
		}
	case KindTestName:
		if !slices.ContainsFunc(tests, func(name string) bool { return strings.HasPrefix(name, r.Target) }) {
			return "there is no such test"
		}
	case KindPath:
		if _, err := os.Stat(filepath.Join(root, r.Target)); err != nil && !slices.Contains(ignoredFiles, r.Target) {
			return "there is no such file or folder"
		}
	case KindLink:
		target, anchor, _ := strings.Cut(r.Target, "#")
		if target = filepath.Join(filepath.Dir(page), target); strings.HasPrefix(r.Target, "#") {
			target = page
		}
		if _, err := os.Stat(filepath.Join(root, target)); err != nil {
			return "there is no such file or folder"
		}
		if anchor != "" && !slices.Contains(HeadingAnchors(read(t, target)), anchor) {
			return "the page has no such heading"
		}
	}
	return ""
}

// testNames returns the names of all test functions of the repository.
func testNames(t *testing.T) []string {
	t.Helper()
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	var list []string
	for _, path := range files(t, "_test.go") {
		for _, m := range function.FindAllStringSubmatch(read(t, path), -1) {
			list = append(list, m[1])
		}
	}
	return list
}

// read returns the content of a file of the repository.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestReferences_OfPage(t *testing.T) {
	t.Parallel()
	page := strings.Join([]string{
		"See [a](b.md#c), [web](https://example.com) and `[no](link.md)`.",
		"`pkg/events` and `./pkg/bus/...`, not `pkg/*`, `pkg/NAME`, `/pkg/x` or pkg/prose; `make verify`, not make prose; `TestX_Y`.",
		"```sh",
		"make race ARGS=\"-run TestZ\" # make nothing",
		"cd cmd && go test ./cmd/spool/... && scripts/lint",
		"```",
		"```yaml",
		"path: pkg/other",
		"```",
	}, "\n")
	want := []Reference{
		{1, KindLink, "b.md#c"},
		{2, KindPath, "pkg/events"}, {2, KindPath, "pkg/bus"}, {2, KindMakeTarget, "verify"}, {2, KindTestName, "TestX_Y"},
		{4, KindMakeTarget, "race"}, {4, KindTestName, "TestZ"},
		{5, KindPath, "cmd/spool"}, {5, KindPath, "scripts/lint"},
	}
	if got := FindReferences(page); !slices.Equal(got, want) {
		t.Errorf("references are\n%v, want\n%v", got, want)
	}
}

func TestAnchors_OfHeadings(t *testing.T) {
	t.Parallel()
	got := HeadingAnchors("# Go back in time\ntext\n### Of `spool up`\n## TLS, and open ports\n")
	if want := []string{"go-back-in-time", "of-spool-up", "tls-and-open-ports"}; !slices.Equal(got, want) {
		t.Errorf("anchors are %q, want %q", got, want)
	}
}
