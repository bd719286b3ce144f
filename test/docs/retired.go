// Package docs checks the documentation against the repository: the words that docs/glossary.md retires are not used
// in Go code, and what the pages refer to exists.
package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
	"unicode"
)

// retiredHeading is the heading of the section of the glossary that lists retired words.
const retiredHeading = "## Retired words"

// RetiredWords returns the words of the table under "## Retired words", each
// with its replacement. The first cell of a row holds words in backticks, the
// second cell the replacement.
func RetiredWords(glossary string) (map[string]string, error) {
	_, section, found := strings.Cut(glossary, "\n"+retiredHeading+"\n")
	if !found {
		return nil, fmt.Errorf("glossary has no section %q", retiredHeading)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	words := map[string]string{}
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 4 {
			continue // not a row of two cells
		}
		for _, span := range codeSpan.FindAllStringSubmatch(cells[1], -1) {
			words[span[1]] = strings.TrimSpace(cells[2])
		}
	}
	if len(words) == 0 {
		return nil, fmt.Errorf("section %q of the glossary lists no words", retiredHeading)
	}
	return words, nil
}

var (
	codeSpan = regexp.MustCompile("`([^`]+)`")
	goWord   = regexp.MustCompile(`[A-Za-z]+`)
)

// Use is a place in the code where a retired word is used.
type Use struct {
	Position token.Position
	Word     string // as spelled in the glossary
	In       string // the identifier, or the word in the comment
}

// RetiredUses returns the uses of retired words in the identifiers and comments of a Go file. A word is used in an
// identifier if all its camel-case parts follow each other there: oldName is used in hasOldName, but cat is not used
// in category. Case does not matter. Strings are not checked, because names on the wire may keep a word.
func RetiredUses(name string, source []byte, words map[string]string) ([]Use, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	retired := map[string]string{} // by the joined parts
	for word := range words {
		retired[parts(word)] = word
	}
	var uses []Use
	check := func(at token.Pos, text string) {
		has := parts(text)
		for p, word := range retired {
			if strings.Contains(has, p) {
				uses = append(uses, Use{fset.Position(at), word, text})
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok {
			check(id.Pos(), id.Name)
		}
		return true
	})
	for _, group := range file.Comments {
		for _, comment := range group.List {
			for _, at := range goWord.FindAllStringIndex(comment.Text, -1) {
				check(comment.Pos()+token.Pos(at[0]), comment.Text[at[0]:at[1]])
			}
		}
	}
	return uses, nil
}

// parts returns the parts of a camel-case identifier in lower case, each between two spaces: " old name " for
// oldName.
func parts(identifier string) string {
	var b strings.Builder
	b.WriteByte(' ')
	runes := []rune(identifier)
	for i, r := range runes {
		upper := unicode.IsUpper(r)
		if upper && i > 0 && (!unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) || r == '_' {
			b.WriteByte(' ')
		}
		if r != '_' {
			b.WriteRune(unicode.ToLower(r))
		}
	}
	b.WriteByte(' ')
	return b.String()
}
