// Package ignore reads rules in the syntax of gitignore and tells what they leave out. It is pure.
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

// Rules decide what is ignored: the last one that matches does.
type Rules []rule

// rule is a line of an ignore file.
type rule struct {
	keep    bool     // "!": takes back what a rule before it ignores
	folder  bool     // "/" at the end: folders alone
	pattern []string // its elements; "**" stands for any number of them
}

// Parse reads gitignore's syntax, see gitignore(5). Lines that cannot be
// read are left out and named by the error.
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

func parseRule(line string) (r rule, ok bool, err error) {
	line = strings.TrimSuffix(line, "\r")
	for strings.HasSuffix(line, " ") && !strings.HasSuffix(line, `\ `) {
		line = line[:len(line)-1]
	}
	if line == "" || line[0] == '#' {
		return rule{}, false, nil
	}
	if !utf8.ValidString(line) {
		return rule{}, false, errors.New("is not UTF-8")
	}
	if line[0] == '!' {
		r.keep, line = true, line[1:]
	}
	if cut, isFolder := strings.CutSuffix(line, "/"); isFolder {
		r.folder, line = true, cut
	}
	// A slash at the beginning or in the middle ties the pattern to the root.
	anchored := strings.Contains(line, "/")
	line = strings.TrimPrefix(line, "/")
	if line == "" {
		return rule{}, false, nil
	}
	r.pattern = strings.Split(line, "/")
	for i, element := range r.pattern {
		element = strings.ReplaceAll(element, "[!", "[^")
		if element != "**" {
			if _, err := path.Match(element, ""); err != nil {
				return rule{}, false, fmt.Errorf("pattern %q: %w", line, err)
			}
		}
		r.pattern[i] = element
	}
	if !anchored {
		r.pattern = slices.Insert(r.pattern, 0, "**")
	}
	return r, true, nil
}

// Ignores tells about a path, with slashes, relative to the root. Nothing below an
// ignored folder is to be asked for.
func (rs Rules) Ignores(rel string, folder bool) bool {
	ignored, _ := rs.decide(rel, folder)
	return ignored
}

// decide also reports whether any rule matches the path.
func (rs Rules) decide(rel string, folder bool) (ignored, decided bool) {
	elements := strings.Split(rel, "/")
	for _, r := range slices.Backward(rs) {
		if (folder || !r.folder) && matches(r.pattern, elements) {
			return !r.keep, true
		}
	}
	return false, false
}

// matches matches a path element by element.
func matches(pattern, elements []string) bool {
	for len(pattern) > 0 {
		if pattern[0] == "**" {
			if len(pattern) == 1 {
				return len(elements) > 0 // at the end: all that is inside
			}
			for i := range elements {
				if matches(pattern[1:], elements[i:]) {
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
