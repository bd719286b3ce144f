package redact

import (
	"encoding/json"
	"reflect"
	"slices"
)

// RedactFields returns a copy of the struct v whose strings are redacted by s, at any depth. Strings of a named type
// are enumerations and stay unchanged; so do the fields with the names in keep.
func RedactFields[T any](s *Set, v T, keep ...string) T {
	if s == nil {
		return v
	}
	out := s.redactedCopy(reflect.ValueOf(&v).Elem(), keep)
	clean, ok := out.Interface().(T)
	if !ok {
		return v // the copy has its type
	}
	return clean
}

var (
	// rawMessageType and stringType are the types of the fields that RedactFields changes.
	rawMessageType = reflect.TypeFor[json.RawMessage]()
	stringType     = reflect.TypeFor[string]()
)

// redactedCopy returns a copy of v with redacted strings. The fields with the names in keep stay unchanged. Values
// without strings are shared.
func (s *Set) redactedCopy(v reflect.Value, keep []string) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	switch {
	case v.Type() == rawMessageType:
		out.SetBytes(s.RedactJSON(v.Bytes()))
	case v.Type() == stringType:
		out.SetString(s.RedactString(v.String()))
	case v.Kind() == reflect.Interface && !v.IsNil():
		out.Set(s.redactedCopy(v.Elem(), keep))
	case v.Kind() == reflect.Pointer && !v.IsNil():
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(s.redactedCopy(v.Elem(), keep))
		out.Set(to)
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !slices.Contains(keep, f.Name) {
				out.Field(i).Set(s.redactedCopy(v.Field(i), keep))
			}
		}
	case v.Kind() == reflect.Slice && !v.IsNil() && v.Type().Elem().Kind() != reflect.Uint8:
		out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			out.Index(i).Set(s.redactedCopy(v.Index(i), keep))
		}
	case v.Kind() == reflect.Map && !v.IsNil():
		out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for it := v.MapRange(); it.Next(); {
			out.SetMapIndex(s.redactedCopy(it.Key(), keep), s.redactedCopy(it.Value(), keep))
		}
	}
	return out
}
