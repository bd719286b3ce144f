package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// TestDefaults_AreStatedOnce tests that only one field of all programs states the default of a setting. Programs with the
// same setting embed one struct, or refer to the field by settings.DefaultVariables.
func TestDefaults_AreStatedOnce(t *testing.T) {
	t.Parallel()
	stated := map[string]string{} // the position of the field, by environment variable
	for _, path := range files(t, ".go") {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range statedDefaults(t, file) {
			if other, found := stated[s.variable]; found {
				t.Errorf("the default of %s is stated in %s and in %s", s.variable, other, path)
			}
			stated[s.variable] = path
		}
	}
	if len(stated) < 100 {
		t.Errorf("found %d settings with a default, want at least 100", len(stated))
	}
}

// statedDefault is a setting whose field has a default of its own.
type statedDefault struct{ variable, value string }

func statedDefaults(t *testing.T, file *ast.File) (list []statedDefault) {
	t.Helper()
	ast.Inspect(file, func(n ast.Node) bool {
		field, ok := n.(*ast.Field)
		if !ok || field.Tag == nil {
			return true
		}
		text, err := strconv.Unquote(field.Tag.Value)
		if err != nil {
			t.Fatal(err)
		}
		tag := reflect.StructTag(text)
		variable, value := tag.Get("env"), tag.Get("default")
		if variable != "" && value != "" && value != "false" && !strings.HasPrefix(value, "${") && !ownDefault[variable+"="+value] {
			list = append(list, statedDefault{variable, value})
		}
		return true
	})
	return list
}

// ownDefault holds the defaults of programs that differ from other programs' on purpose.
var ownDefault = map[string]bool{
	"SPOOL_LOG_LEVEL=warn": true, // spool up, which logs to a terminal
	"SPOOL_AUTH=keys":      true, // spool up, which creates a key
}
