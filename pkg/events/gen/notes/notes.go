// Package notes reads the comments of struct fields from Go source, for generated documents.
package notes

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
)

// ReadFieldComments returns the line comments of the fields of all structs in a folder, keyed by Type.Field.
func ReadFieldComments(dir string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	notes := map[string]string{}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, field := range s.Fields.List {
					for _, id := range field.Names {
						notes[spec.Name.Name+"."+id.Name] = strings.TrimSpace(field.Comment.Text())
					}
				}
			}
			return true
		})
	}
	return notes, nil
}
