package command

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestWritef_MakesArgumentsVisible tests that texts of any type lose no character and obtain no control over the
// terminal, and that the format itself is written as it is.
func TestWritef_MakesArgumentsVisible(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if _, err := writef(&out, "\x1b[31m%s|%v|%s|%5d|%v|%s|%-6s|\n", "a\x1b]0;\nb\x07", errors.New("c\u202e\nd"), textLines("e\r\nf"), 7, struct{ Name string }{"g\u3164"}, 3*time.Second, "h"); err != nil {
		t.Fatal(err)
	}
	if _, err := writeln(&out, "i\n", uint32(8)); err != nil {
		t.Fatal(err)
	}
	want := "\x1b[31ma\\u{1b}]0;\\u{a}b\\u{7}|c\\u{202e}\\u{a}d|e\\u{d}\nf|    7|{g\\u{3164}}|3s|h     |\ni\\u{a} 8\n"
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

// TestCommands_WriteThroughWritef tests that no command writes text for people past writef, writeln and tables.
func TestCommands_WriteThroughWritef(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	allowed := map[string]bool{"output.go": true, "table.go": true}
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
