package redact

import (
	"encoding/json"
	"reflect"
	"slices"
)

// Value returns a copy of a struct whose strings are redacted, at any depth. Strings of a named type are enumerations
// and stay; so do the fields with the given names.
func Value[T any](s *Set, v T, keep ...string) T {
	if s == nil {
		return v
	}
	out := s.copy(reflect.ValueOf(&v).Elem(), keep)
	clean, ok := out.Interface().(T)
	if !ok {
		return v // the copy has its type
	}
	return clean
}

var (
	rawType  = reflect.TypeFor[json.RawMessage]()
	textType = reflect.TypeFor[string]()
)

// copy returns a redacted copy. Values without strings are shared.
func (s *Set) copy(v reflect.Value, keep []string) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	switch {
	case v.Type() == rawType:
		out.SetBytes(s.JSON(v.Bytes()))
	case v.Type() == textType:
		out.SetString(s.String(v.String()))
	case v.Kind() == reflect.Interface && !v.IsNil():
		out.Set(s.copy(v.Elem(), keep))
	case v.Kind() == reflect.Pointer && !v.IsNil():
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(s.copy(v.Elem(), keep))
		out.Set(to)
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !slices.Contains(keep, f.Name) {
				out.Field(i).Set(s.copy(v.Field(i), keep))
			}
		}
	case v.Kind() == reflect.Slice && !v.IsNil() && v.Type().Elem().Kind() != reflect.Uint8:
		out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			out.Index(i).Set(s.copy(v.Index(i), keep))
		}
	case v.Kind() == reflect.Map && !v.IsNil():
		out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for it := v.MapRange(); it.Next(); {
			out.SetMapIndex(s.copy(it.Key(), keep), s.copy(it.Value(), keep))
		}
	}
	return out
}
