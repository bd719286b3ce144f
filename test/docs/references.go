package docs

import (
	"regexp"
	"strings"
)

// Reference is the name of something in the repository that a document contains: a link, a path, a make target or a
// test.
type Reference struct {
	Line   int // from 1
	Kind   ReferenceKind
	Target string
}

// ReferenceKind is the kind of a Reference.
type ReferenceKind string

// The kinds of references.
const (
	// KindLink is the kind of a reference that is the target of a Markdown link, relative to the document.
	KindLink ReferenceKind = "link"
	// KindPath is the kind of a reference that is the path of a file or folder, relative to the root of the repository.
	KindPath ReferenceKind = "path"
	// KindMakeTarget is the kind of a reference that is a target of the Makefile.
	KindMakeTarget ReferenceKind = "make target"
	// KindTestName is the kind of a reference that is the name of a test function, or the beginning of it.
	KindTestName ReferenceKind = "test"
)

var (
	// linkPattern matches the target of a Markdown link.
	linkPattern = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	// pathPattern matches a word that is a path of the repository.
	pathPattern = regexp.MustCompile(`^(?:\./)?((?:pkg|services|cmd|test|scripts|deploy|docs|\.ci)/[\w./-]*\w|\.golangci\.yaml|go\.work|Makefile)(?:/\.\.\.)?$`)
	// testNamePattern matches the name of a test function.
	testNamePattern = regexp.MustCompile(`\bTest[A-Z]\w*`)

	// placeholderPattern matches an element of a path in capital letters, such as NAME, for which the reader inserts
	// something.
	placeholderPattern = regexp.MustCompile(`(?:^|/)[A-Z]+(?:/|$)`)
)

// FindReferences returns the references in a Markdown document: links anywhere in it; paths, make targets and tests in
// code spans and in blocks of shell commands. It leaves out paths with a placeholder, such as *, <name> or NAME.
func FindReferences(page string) []Reference {
	var list []Reference
	fence := "" // the language of the open block
	inFence := false
	n := 0
	for line := range strings.Lines(page) {
		n++
		add := func(k ReferenceKind, target string) { list = append(list, Reference{n, k, target}) }
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
			for _, m := range linkPattern.FindAllStringSubmatch(codeSpanPattern.ReplaceAllString(line, ""), -1) {
				if !strings.Contains(m[1], "://") && !strings.HasPrefix(m[1], "mailto:") {
					add(KindLink, m[1])
				}
			}
			for _, m := range codeSpanPattern.FindAllStringSubmatch(line, -1) {
				code = append(code, m[1])
			}
		}
		for _, c := range code {
			words := strings.Fields(c)
			for i, w := range words {
				if m := pathPattern.FindStringSubmatch(w); m != nil && !placeholderPattern.MatchString(m[1]) {
					add(KindPath, m[1])
				}
				if w == "make" && i+1 < len(words) && (i == 0 || words[i-1] == "&&") {
					add(KindMakeTarget, words[i+1])
				}
			}
			for _, test := range testNamePattern.FindAllString(c, -1) {
				add(KindTestName, test)
			}
		}
	}
	return list
}

var (
	// headingPattern matches a heading of a Markdown document.
	headingPattern = regexp.MustCompile(`(?m)^#+ +(.+?) *$`)
	// notInAnchorPattern matches the characters of a heading that GitHub leaves out of the heading's anchor.
	notInAnchorPattern = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// HeadingAnchors returns the anchors that GitHub generates for the headings of a Markdown document. It does not add the
// numbers that GitHub adds to repeated headings.
func HeadingAnchors(page string) []string {
	var list []string
	for _, m := range headingPattern.FindAllStringSubmatch(page, -1) {
		slug := notInAnchorPattern.ReplaceAllString(strings.ToLower(m[1]), "")
		list = append(list, strings.ReplaceAll(slug, " ", "-"))
	}
	return list
}
