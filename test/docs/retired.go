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

// retiredHeading is the heading of the section in docs/glossary.md that lists retired words.
const retiredHeading = "## Retired words"

// RetiredWords returns the retired words that the table in docs/glossary.md lists under "## Retired words", each with
// the word to use instead. glossary is the text of the document. In a row of the table, the first cell holds words in
// backticks, the second cell what to use instead.
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
		for _, span := range codeSpanPattern.FindAllStringSubmatch(cells[1], -1) {
			words[span[1]] = strings.TrimSpace(cells[2])
		}
	}
	if len(words) == 0 {
		return nil, fmt.Errorf("section %q of the glossary lists no words", retiredHeading)
	}
	return words, nil
}

var (
	// codeSpanPattern matches a Markdown code span, text in backticks.
	codeSpanPattern = regexp.MustCompile("`([^`]+)`")
	// wordPattern matches a word of letters in a comment.
	wordPattern = regexp.MustCompile(`[A-Za-z]+`)
)

// RetiredUse is a place in Go code where a retired word is used.
type RetiredUse struct {
	Position token.Position
	Word     string // as spelled in the glossary
	In       string // the identifier, or the word in the comment
}

// FindRetiredUses returns the uses of retired words in the identifiers and comments of a Go file. words holds the
// retired words as keys. A word is used in an identifier if its camel-case parts follow each other there: oldName is
// used in hasOldName, but cat is not used in category. Case does not matter. Strings are not checked, because names in
// stored or sent data may keep a word.
func FindRetiredUses(name string, source []byte, words map[string]string) ([]RetiredUse, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	retired := map[string]string{} // by the joined parts
	for word := range words {
		retired[camelCaseParts(word)] = word
	}
	var uses []RetiredUse
	check := func(at token.Pos, text string) {
		has := camelCaseParts(text)
		for p, word := range retired {
			if strings.Contains(has, p) {
				uses = append(uses, RetiredUse{fset.Position(at), word, text})
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
			for _, at := range wordPattern.FindAllStringIndex(comment.Text, -1) {
				check(comment.Pos()+token.Pos(at[0]), comment.Text[at[0]:at[1]])
			}
		}
	}
	return uses, nil
}

// camelCaseParts returns the camel-case parts of an identifier in lower case, with a space before and after each: " old
// name " for oldName.
func camelCaseParts(identifier string) string {
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
