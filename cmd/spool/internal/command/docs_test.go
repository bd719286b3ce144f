package command

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// TestPages_NameCommandsThatExist tests that the command and the flags exist for each command line of spool in the code
// of every page. Decision records and the changelog describe the past and are not checked.
func TestPages_NameCommandsThatExist(t *testing.T) {
	t.Parallel()
	grammar, err := CLIModel()
	if err != nil {
		t.Fatal(err)
	}
	const root = "../../../.."
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "test/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	checked := 0
	for _, page := range pages {
		if filepath.Base(page) == "CHANGELOG.md" {
			continue
		}
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range commandLines(string(b)) {
			if problem := unknownIn(grammar.Node, line); problem != "" {
				t.Errorf("%s: %q: %s", page, line, problem)
			}
			checked++
		}
	}
	if checked < 150 {
		t.Errorf("checked %d command lines, want at least 150", checked)
	}
}

func TestUnknownIn_FindsCommandsAndFlags(t *testing.T) {
	t.Parallel()
	grammar, err := CLIModel()
	if err != nil {
		t.Fatal(err)
	}
	for line, known := range map[string]bool{
		"sessions show ses_1 --json": true, "sessions": true, "run --architecture codex \"query\"": true, "executions ls|show": true,
		"run --command \"qwen --acp\" --model M": true,
		"session show":                           false, "sessions shw": false, "sessions show --jsn": false, "run --archtecture codex": false,
	} {
		if problem := unknownIn(grammar.Node, line); (problem == "") != known {
			t.Errorf("%q: problem %q, want known %t", line, problem, known)
		}
	}
}

var (
	codeOf   = regexp.MustCompile("(?s)```sh\n.*?```|`[^`\n]+`")
	quoted   = regexp.MustCompile(`"[^"]*"`)
	spoolRun = regexp.MustCompile(`(?m)(?:^|[^\w/.-])(?:bin/)?spool +([a-z][^\n;&>#` + "`" + `]*)`)
)

// commandLines returns the arguments of spool's command lines in the code of a page: in blocks of shell commands and in
// code spans.
func commandLines(page string) []string {
	var list []string
	for _, code := range codeOf.FindAllString(page, -1) {
		code = strings.ReplaceAll(code, "\\\n", " ")
		for _, m := range spoolRun.FindAllStringSubmatch(code, -1) {
			list = append(list, strings.TrimSpace(m[1]))
		}
	}
	return list
}

// unknownIn returns the first word of a command line that the grammar does not have, or "". Each of several
// alternatives, such as ls|show, must exist.
func unknownIn(node *kong.Node, line string) string {
	line, _, _ = strings.Cut(quoted.ReplaceAllString(line, "TEXT"), " | ")
	for _, word := range strings.Fields(line) {
		if word = strings.Trim(word, "[](),."); word == "…" {
			return "" // any command
		}
		if flag, ok := strings.CutPrefix(word, "--"); ok {
			flag, _, _ = strings.Cut(flag, "=")
			if flag != "" && !hasFlag(node, flag) {
				return "no flag --" + flag
			}
			continue
		}
		if len(node.Children) == 0 {
			continue // an argument
		}
		var next *kong.Node
		for name := range strings.SplitSeq(word, "|") {
			i := slices.IndexFunc(node.Children, func(n *kong.Node) bool { return n.Name == name })
			if i < 0 {
				return "no command " + name
			}
			next = node.Children[i]
		}
		node = next
	}
	return ""
}

// hasFlag reports whether a command or one of its parents has a flag.
func hasFlag(node *kong.Node, flag string) bool {
	for _, group := range node.AllFlags(false) {
		if slices.ContainsFunc(group, func(f *kong.Flag) bool {
			return f.Name == flag || "no-"+f.Name == flag || slices.Contains(f.Aliases, flag)
		}) {
			return true
		}
	}
	return false
}
