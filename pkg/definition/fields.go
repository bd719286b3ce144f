package definition

import (
	"reflect"
	"strings"
)

// field is a field of a Go struct with its name in files and JSON.
type field struct {
	name     string
	index    int
	required bool // it is not omitted if it is empty
}

// fieldsOf returns a struct's fields in their order.
func fieldsOf(t reflect.Type) []field {
	out := make([]field, 0, t.NumField())
	for i := range t.NumField() {
		name, options, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		out = append(out, field{name, i, options == ""})
	}
	return out
}
