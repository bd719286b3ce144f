// Package ignore evaluates rules in the syntax of gitignore. Rules is pure; Tree reads the rules from the files of a
// folder.
package ignore

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// Rules are the rules of an ignore file. The last rule that matches a path decides whether the path is ignored.
type Rules []ignoreRule

// ignoreRule is the parsed form of a line in an ignore file.
type ignoreRule struct {
	keep    bool     // "!": un-ignores what an earlier rule ignores
	folder  bool     // "/" at the end: matches only folders
	pattern []string // path elements; "**" matches any number of them
}

// Parse parses ignore rules in the syntax of gitignore(5). It skips invalid lines and returns an error that names them.
func Parse(text []byte) (Rules, error) {
	var out Rules
	var errs []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		r, ok, err := parseRule(lines.Text())
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", n, err))
		} else if ok {
			out = append(out, r)
		}
	}
	return out, errors.Join(append(errs, lines.Err())...)
}

func parseRule(line string) (r ignoreRule, ok bool, err error) {
	line = strings.TrimSuffix(line, "\r")
	for strings.HasSuffix(line, " ") && !strings.HasSuffix(line, `\ `) {
		line = line[:len(line)-1]
	}
	if line == "" || line[0] == '#' {
		return ignoreRule{}, false, nil
	}
	if !utf8.ValidString(line) {
		return ignoreRule{}, false, errors.New("is not UTF-8")
	}
	if line[0] == '!' {
		r.keep, line = true, line[1:]
	}
	if cut, isFolder := strings.CutSuffix(line, "/"); isFolder {
		r.folder, line = true, cut
	}
	// A slash at the beginning or in the middle anchors the pattern at the root.
	anchored := strings.Contains(line, "/")
	line = strings.TrimPrefix(line, "/")
	if line == "" {
		return ignoreRule{}, false, nil
	}
	r.pattern = strings.Split(line, "/")
	for i, element := range r.pattern {
		element = strings.ReplaceAll(element, "[!", "[^")
		if element != "**" {
			if _, err := path.Match(element, ""); err != nil {
				return ignoreRule{}, false, fmt.Errorf("pattern %q: %w", line, err)
			}
		}
		r.pattern[i] = element
	}
	if !anchored {
		r.pattern = slices.Insert(r.pattern, 0, "**")
	}
	return r, true, nil
}

// Ignores reports whether the rules ignore a path. The path is relative to the root, with slashes. Callers must not
// pass paths below an ignored folder: they are ignored too.
func (rs Rules) Ignores(rel string, folder bool) bool {
	ignored, _ := rs.matchLast(rel, folder)
	return ignored
}

// matchLast reports whether the last rule that matches the path ignores it, and whether any rule matches.
func (rs Rules) matchLast(rel string, folder bool) (ignored, decided bool) {
	elements := strings.Split(rel, "/")
	for _, r := range slices.Backward(rs) {
		if (folder || !r.folder) && matchElements(r.pattern, elements) {
			return !r.keep, true
		}
	}
	return false, false
}

// matchElements reports whether an ignore pattern matches a path, element by element.
func matchElements(pattern, elements []string) bool {
	for len(pattern) > 0 {
		if pattern[0] == "**" {
			if len(pattern) == 1 {
				return len(elements) > 0 // at the end: matches everything inside
			}
			for i := range elements {
				if matchElements(pattern[1:], elements[i:]) {
					return true
				}
			}
			return false
		}
		if len(elements) == 0 {
			return false
		}
		if ok, err := path.Match(pattern[0], elements[0]); err != nil || !ok {
			return false
		}
		pattern, elements = pattern[1:], elements[1:]
	}
	return len(elements) == 0
}
