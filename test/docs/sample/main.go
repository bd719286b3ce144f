// Command sample prints comments and names of this repository, picked at random, so that a reader who has not seen the
// files can judge whether they are understood at first reading:
//
//	go run ./test/docs/sample -n 10 -seed 1
//
// Generated code and tests are left out.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io"
	"io/fs"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	root := flag.String("root", ".", "the root folder of the repository")
	count := flag.Int("n", 10, "number of comments, and of names")
	seed := flag.Uint64("seed", 1, "seed of the random numbers")
	flag.Parse()
	comments, names, err := readDeclarations(*root)
	if err != nil {
		log.Fatal(err)
	}
	random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // a sample that can be repeated
	printSample(os.Stdout, "comments", comments, *count, random)
	printSample(os.Stdout, "names", names, *count, random)
}

// printSample prints count items of a list, picked at random, under a title.
func printSample(to io.Writer, title string, items []string, count int, random *rand.Rand) {
	fmt.Fprintf(to, "# %d of %d %s\n", min(count, len(items)), len(items), title)
	for i, n := range random.Perm(len(items))[:min(count, len(items))] {
		fmt.Fprintf(to, "\n%d. %s\n", i+1, items[n])
	}
	fmt.Fprintln(to)
}

// readDeclarations returns the comments of the documented declarations in all Go files below the folder root, and the
// names of all package-level declarations and methods, each with its position.
func readDeclarations(root string) (comments, names []string, err error) {
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (path != root && strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata" || entry.Name() == "node_modules"):
			return filepath.SkipDir
		case entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil || ast.IsGenerated(file) {
			return err
		}
		c := fileCollector{files: files}
		for _, d := range file.Decls {
			c.addDeclaration(d)
		}
		comments, names = append(comments, c.comments...), append(names, c.names...)
		return nil
	})
	return comments, names, err
}

// fileCollector collects the comments and names of the declarations of one Go file.
type fileCollector struct {
	files           *token.FileSet
	comments, names []string
}

// addDeclaration adds the names in a declaration, and its comments.
func (c *fileCollector) addDeclaration(d ast.Decl) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		signature := *d
		signature.Doc, signature.Body = nil, nil
		c.addNames(d.Doc, firstLine(&signature), d.Name)
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				doc := s.Doc
				if doc == nil && len(d.Specs) == 1 {
					doc = d.Doc
				}
				spec := *s
				spec.Doc, spec.Comment = nil, nil
				c.addNames(doc, "type "+firstLine(&spec), s.Name)
			case *ast.ValueSpec:
				doc := s.Doc
				if doc == nil && len(d.Specs) == 1 {
					doc = d.Doc
				}
				spec := *s
				spec.Doc, spec.Comment = nil, nil
				c.addNames(doc, d.Tok.String()+" "+firstLine(&spec), s.Names...)
			}
		}
	}
}

// firstLine returns the first line of the source code of a declaration.
func firstLine(declaration ast.Node) string {
	var b bytes.Buffer
	if err := printer.Fprint(&b, token.NewFileSet(), declaration); err != nil {
		log.Fatal(err)
	}
	line, _, _ := strings.Cut(b.String(), "\n")
	return line
}

// addNames adds the names of one declaration, and its comment doc unless it is nil. text is printed with them.
func (c *fileCollector) addNames(doc *ast.CommentGroup, text string, names ...*ast.Ident) {
	position := c.files.Position(names[0].Pos())
	for _, n := range names {
		if n.Name != "_" && n.Name != "main" && n.Name != "init" {
			c.names = append(c.names, fmt.Sprintf("%s   (%s, %s)", n.Name, text, position))
		}
	}
	if doc != nil {
		c.comments = append(c.comments, fmt.Sprintf("%s\n   %s\n   %s", position, text, strings.ReplaceAll(strings.TrimSpace(doc.Text()), "\n", "\n   ")))
	}
}
