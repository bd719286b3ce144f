package docs

import (
	"regexp"
	"strings"
)

// Reference is something in the repository that a page refers to.
type Reference struct {
	Line   int // from 1
	Kind   Kind
	Target string
}

// Kind is the kind of a Reference that a document contains.
type Kind string

// The kinds of references.
const (
	Link       Kind = "link"        // the target of a Markdown link, relative to the page
	Path       Kind = "path"        // a file or folder, relative to the repository
	MakeTarget Kind = "make target" // a target of the Makefile
	TestName   Kind = "test"        // a test function, or the beginning of its name
)

var (
	link = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	path = regexp.MustCompile(`^(?:\./)?((?:pkg|services|cmd|test|scripts|deploy|docs|\.ci)/[\w./-]*\w|\.golangci\.yaml|go\.work|Makefile)(?:/\.\.\.)?$`)
	name = regexp.MustCompile(`\bTest[A-Z]\w*`)

	// placeholder matches an element of a path in capitals, such as NAME.
	placeholder = regexp.MustCompile(`(?:^|/)[A-Z]+(?:/|$)`)
)

// References returns the references of a page in Markdown: links anywhere; paths, make targets and tests in code
// spans and in blocks of shell commands. Paths with a placeholder, such as *, <name> or NAME, are not references.
func References(page string) []Reference {
	var list []Reference
	fence := "" // the language of the open block
	inFence := false
	n := 0
	for line := range strings.Lines(page) {
		n++
		add := func(k Kind, target string) { list = append(list, Reference{n, k, target}) }
		if language, ok := strings.CutPrefix(strings.TrimSpace(line), "```"); ok {
			inFence, fence = !inFence, language
			continue
		}
		var code []string
		switch {
		case inFence && fence == "sh":
			command, _, _ := strings.Cut(line, " # ")
			code = append(code, command)
		case inFence:
		default:
			for _, m := range link.FindAllStringSubmatch(codeSpan.ReplaceAllString(line, ""), -1) {
				if !strings.Contains(m[1], "://") && !strings.HasPrefix(m[1], "mailto:") {
					add(Link, m[1])
				}
			}
			for _, m := range codeSpan.FindAllStringSubmatch(line, -1) {
				code = append(code, m[1])
			}
		}
		for _, c := range code {
			words := strings.Fields(c)
			for i, w := range words {
				if m := path.FindStringSubmatch(w); m != nil && !placeholder.MatchString(m[1]) {
					add(Path, m[1])
				}
				if w == "make" && i+1 < len(words) && (i == 0 || words[i-1] == "&&") {
					add(MakeTarget, words[i+1])
				}
			}
			for _, test := range name.FindAllString(c, -1) {
				add(TestName, test)
			}
		}
	}
	return list
}

var (
	heading   = regexp.MustCompile(`(?m)^#+ +(.+?) *$`)
	notInSlug = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// Anchors returns the anchors of a page's headings, as GitHub makes them,
// without numbers for headings that repeat.
func Anchors(page string) []string {
	var list []string
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		slug := notInSlug.ReplaceAllString(strings.ToLower(m[1]), "")
		list = append(list, strings.ReplaceAll(slug, " ", "-"))
	}
	return list
}
