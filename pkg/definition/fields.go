package definition

import (
	"reflect"
	"strings"
)

// structField is a field of a Go struct with its name in files and JSON.
type structField struct {
	name     string
	index    int
	required bool // it is not omitted if it is empty
}

// structFields returns the fields of a struct in the order of their declaration.
func structFields(t reflect.Type) []structField {
	out := make([]structField, 0, t.NumField())
	for i := range t.NumField() {
		name, options, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		out = append(out, structField{name, i, options == ""})
	}
	return out
}
