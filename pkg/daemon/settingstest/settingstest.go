// Package settingstest checks that no setting is without a test that changes it and sees the effect.
package settingstest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// Covered fails t unless each setting of a struct with kong's tags has, under
// its variable, the name of a test that exists: in the package that runs this,
// or with the package's folder before it ("internal/egress/TestIdle"). The
// file of that test must name the setting, by its field or its variable.
func Covered(t testing.TB, settings any, tests map[string]string) {
	t.Helper()
	left := map[string]bool{}
	for variable := range tests {
		left[variable] = true
	}
	for _, f := range fields(reflect.TypeOf(settings)) {
		variable := f.Tag.Get("env")
		test, ok := tests[variable]
		if !ok {
			t.Errorf("setting %s (%s) has no test that changes it and sees the effect", f.Name, variable)
			continue
		}
		delete(left, variable)
		dir, name := filepath.Split(test)
		text, err := source(filepath.Join(".", dir), name)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case text == "":
			t.Errorf("setting %s (%s): there is no test %s", f.Name, variable, test)
		case !strings.Contains(text, f.Name) && !strings.Contains(text, variable):
			t.Errorf("setting %s (%s): the file of %s does not name it", f.Name, variable, test)
		}
	}
	for variable := range left {
		t.Errorf("%s is no setting any more", variable)
	}
}

// fields are those of a struct that have a variable, those of embedded structs too.
func fields(t reflect.Type) (list []reflect.StructField) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for i := range t.NumField() {
		switch f := t.Field(i); {
		case f.Anonymous:
			list = append(list, fields(f.Type)...)
		case f.Tag.Get("env") != "":
			list = append(list, f)
		}
	}
	return list
}

// source is the test file of a folder that has a function; "" for none.
func source(dir, name string) (string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return "", err
	}
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, raw, parser.SkipObjectResolution)
		if err != nil {
			return "", err
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == name {
				return string(raw), nil
			}
		}
	}
	return "", nil
}
