package skill

import (
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/truncate"
)

// readDocument returns the name and the description in the front matter of SKILL.md: YAML between two lines of three
// hyphens, the first of which must be the first line.
func readDocument(document string) (name, description string, err error) {
	switch {
	case !utf8.ValidString(document):
		return "", "", documentError("", "is not UTF-8")
	case strings.ContainsRune(document, 0):
		return "", "", documentError("", "has a NUL byte")
	}
	front, _, ok := splitFrontMatter(document)
	switch {
	case !ok:
		return "", "", documentError("", "has no front matter; must begin with a line of ---, then name and description, then a line of ---")
	case len(front) > maxFrontMatterSize:
		return "", "", documentError("", "has a front matter of %d bytes; the limit is %d", len(front), maxFrontMatterSize)
	}
	var fields map[string]yaml.Node
	if err := yaml.Unmarshal([]byte(front), &fields); err != nil {
		return "", "", documentError("", "has a front matter that is not a YAML mapping: %s", oneLine(err.Error()))
	}
	if name, err = textField(fields, "name"); err != nil {
		return "", "", err
	}
	if !isName(name) {
		return "", "", documentError("name", "%s is not 1 to %d characters of a-z and 0-9, in groups joined by single dots or hyphens", quoteName(name), maxSkillNameLength)
	}
	if description, err = textField(fields, "description"); err != nil {
		return "", "", err
	}
	if n := utf8.RuneCountInString(description); n > maxDescriptionLength {
		return "", "", documentError("description", "has %d characters; the limit is %d", n, maxDescriptionLength)
	}
	return name, description, nil
}

// splitFrontMatter returns the front matter of SKILL.md and the text after it.
func splitFrontMatter(document string) (front, body string, ok bool) {
	document = strings.TrimPrefix(document, "\ufeff")
	first, rest, ok := strings.Cut(document, "\n")
	if !ok || strings.TrimRight(first, " \t\r") != "---" {
		return "", document, false
	}
	for at := 0; at < len(rest); {
		line, _, more := strings.Cut(rest[at:], "\n")
		if strings.TrimRight(line, " \t\r") == "---" {
			return rest[:at], strings.TrimPrefix(rest[at+len(line):], "\n"), true
		}
		if !more {
			break
		}
		at += len(line) + 1
	}
	return "", document, false
}

// textField returns a required field of the front matter, which must be a text.
func textField(fields map[string]yaml.Node, name string) (string, error) {
	n, ok := fields[name]
	switch {
	case !ok:
		return "", documentError(name, "is required in the front matter")
	case n.Kind != yaml.ScalarNode || n.Tag != "!!str":
		return "", documentError(name, "is not text; put it in quotes")
	case strings.TrimSpace(n.Value) == "":
		return "", documentError(name, "is empty")
	}
	return n.Value, nil
}

// isName reports whether the name of a skill matches ^[a-z0-9]+([.-][a-z0-9]+)*$.
func isName(s string) bool {
	if s == "" || len(s) > maxSkillNameLength {
		return false
	}
	joint := true
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
			joint = false
		case (c == '.' || c == '-') && !joint:
			joint = true
		default:
			return false
		}
	}
	return !joint
}

// oneLine returns the message of a YAML parser on one line of limited length.
func oneLine(s string) string {
	return truncate.Text(strings.Join(strings.Fields(s), " "), 200)
}
