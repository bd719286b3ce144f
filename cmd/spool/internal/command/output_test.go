package command

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestCommands_WriteThroughTheTerminal tests that no command writes text for people past package terminal and tables.
func TestCommands_WriteThroughTheTerminal(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	allowed := map[string]bool{"table.go": true}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || allowed[name] {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			f, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if pkg, ok := f.X.(*ast.Ident); ok && pkg.Name == "fmt" && strings.HasPrefix(f.Sel.Name, "Fprint") {
				t.Errorf("%s: fmt.%s writes texts that nobody has made visible", set.Position(f.Pos()), f.Sel.Name)
			}
			return true
		})
	}
}
