package skill

import (
	"cmp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// checkEntryPath validates the path of an entry in a ZIP: the path must stay inside the folder, and terminals must
// display it unchanged.
func checkEntryPath(raw string) (name string, folder bool, err error) {
	if raw == "" {
		return "", false, refusedEntryError(raw, "has an entry without a name")
	}
	if !utf8.ValidString(raw) {
		return "", false, refusedEntryError(raw, "is not UTF-8")
	}
	name, folder = strings.CutSuffix(raw, "/")
	switch {
	case strings.ContainsFunc(raw, isInvisible):
		return "", false, refusedEntryError(raw, "has a control character in its name")
	case strings.Contains(raw, `\`):
		return "", false, refusedEntryError(raw, "has a backslash in its name; paths have slashes")
	case strings.HasPrefix(raw, "/"):
		return "", false, refusedEntryError(raw, "is an absolute path; must be relative")
	case len(raw) > 1 && raw[1] == ':':
		return "", false, refusedEntryError(raw, "begins with a drive")
	case len(raw) > maxPathLength:
		return "", false, refusedEntryError(raw, "has a path of more than %d bytes", maxPathLength)
	}
	elements := strings.Split(name, "/")
	if len(elements) > maxPathDepth {
		return "", false, refusedEntryError(raw, "is more than %d folders deep", maxPathDepth)
	}
	for _, e := range elements {
		switch {
		case e == "" || e == ".":
			return "", false, refusedEntryError(raw, "has an empty element, or a dot, in its path")
		case e == "..":
			return "", false, refusedEntryError(raw, "has .. in its path")
		case len(e) > maxPathElementLength:
			return "", false, refusedEntryError(raw, "has a name of more than %d bytes", maxPathElementLength)
		}
	}
	return name, folder, nil
}

// isInvisible reports whether a character is invisible or changes how the text around it is displayed.
func isInvisible(r rune) bool {
	switch {
	case unicode.IsControl(r), r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069:
		return true
	case r == 0x200e, r == 0x200f, r == 0x061c, r == 0x2028, r == 0x2029, r == 0xfeff:
		return true
	}
	return false
}

// pathTree holds every path of a ZIP, including folders that appear only as part of other paths.
type pathTree struct {
	fold    cases.Caser
	paths   map[string]treePath
	folders int
	limit   int
}

// treePath is a path in a skill's ZIP, in the spelling in which it occurs first.
type treePath struct {
	name   string
	folder bool
	listed bool // has its own entry
}

// checkPaths returns the folders of a ZIP. It returns an error for two entries whose paths are the same on some file
// system, and for a file that is also a folder.
func checkPaths(list []zipEntry, lim Limits) ([]string, error) {
	t := pathTree{fold: cases.Fold(), paths: map[string]treePath{}, limit: lim.Files}
	for i := range list {
		if err := t.addEntry(&list[i]); err != nil {
			return nil, err
		}
	}
	var folders []string
	for _, p := range t.paths {
		if p.folder {
			folders = append(folders, p.name)
		}
	}
	slices.Sort(folders)
	return folders, nil
}

func (t *pathTree) addEntry(e *zipEntry) error {
	var key strings.Builder
	end := 0
	for element := range strings.SplitSeq(e.name, "/") {
		if end > 0 {
			key.WriteByte('/')
			end++
		}
		end += len(element)
		key.WriteString(norm.NFC.String(t.fold.String(norm.NFC.String(element))))
		last := end == len(e.name)
		p := treePath{name: e.name[:end], folder: !last || e.folder, listed: last}
		was, ok := t.paths[key.String()]
		switch {
		case !ok && p.folder:
			if t.folders++; t.folders > t.limit {
				return tooLargeError("has more than %d folders", t.limit)
			}
		case !ok:
		case was.name != p.name:
			return refusedEntryError(e.raw, "and %s differ only in case or Unicode form", quoteName(was.name))
		case was.folder != p.folder:
			return refusedEntryError(e.raw, "is at or below a path that is both a file and a folder: %s", quoteName(p.name))
		case was.listed && p.listed:
			return refusedEntryError(e.raw, "is in the ZIP twice")
		}
		p.listed = p.listed || was.listed
		t.paths[key.String()] = p
	}
	return nil
}

// sortBy sorts a list by the key of each element.
func sortBy[T any, K cmp.Ordered](list []T, key func(T) K) {
	slices.SortFunc(list, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
}
