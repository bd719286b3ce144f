package wirejson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
)

// UnmarshalValue decodes JSON into the Go value that into points to: structs, maps, slices, strings, booleans, uint32, float64 and
// events.Reference; it panics for another type. It is as strict as Unmarshal: only fields of the type, each once and with the right
// type. null is the same as absent. path is the position of the value in its document, for example spec.tools, or "" for a whole
// document. The error is a *FieldError that does not contain text of the value; the value may then be partly set.
func UnmarshalValue(data []byte, path string, into any) error {
	if !utf8.Valid(data) {
		return &FieldError{path, "the text is not valid UTF-8"}
	}
	var deep *FieldError
	if errors.As(CheckDepth(data), &deep) {
		if deep.Field != "" {
			path = joinPath(path, deep.Field)
		}
		return &FieldError{path, deep.Detail}
	}
	if data = bytes.TrimSpace(data); len(data) == 0 || !json.Valid(data) {
		return &FieldError{path, "not valid JSON"}
	}
	return decodeGoValue(data, path, reflect.ValueOf(into).Elem())
}

// decodeGoValue decodes JSON into a Go value by reflection; null is the same as absent.
func decodeGoValue(raw json.RawMessage, at string, v reflect.Value) error {
	if string(raw) == "null" {
		return nil
	}
	if r, ok := v.Addr().Interface().(*events.Reference); ok {
		return readReference(raw, at, r)
	}
	switch v.Kind() {
	case reflect.Struct:
		return decodeStruct(raw, at, v)
	case reflect.Map:
		return decodeGoMap(raw, at, v)
	case reflect.Slice:
		return decodeSlice(raw, at, v)
	case reflect.String:
		if raw[0] != '"' {
			return &FieldError{at, "must be a string, not " + jsonTypeOf(raw)}
		}
		s, err := readString(raw, at)
		v.SetString(s)
		return err
	case reflect.Bool:
		if s := string(raw); s != "true" && s != "false" {
			return wrongTypeError(at, "true or false", raw)
		}
		v.SetBool(raw[0] == 't')
		return nil
	case reflect.Uint32:
		n, err := strconv.ParseUint(string(raw), 10, 32)
		if err != nil {
			return wrongTypeError(at, "a whole number from 0 to 4294967295", raw)
		}
		v.SetUint(n)
		return nil
	case reflect.Float64:
		n, err := strconv.ParseFloat(string(raw), 64)
		if err != nil {
			return wrongTypeError(at, "a number", raw)
		}
		v.SetFloat(n)
		return nil
	}
	panic(fmt.Sprintf("wirejson: %s is a %s, which no definition uses", at, v.Type()))
}

func decodeStruct(raw json.RawMessage, at string, v reflect.Value) error {
	fields := map[string]reflect.Value{}
	var names []string
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		fields[name], names = v.Field(i), append(names, name)
	}
	seen := map[string]bool{}
	return forEachMember(raw, at, func(name string, raw json.RawMessage) error {
		at := joinPath(at, name)
		field, ok := fields[name]
		switch {
		case !ok:
			return &FieldError{at, "unknown field; must be one of " + strings.Join(names, ", ")}
		case seen[name]:
			return &FieldError{at, "is set twice"}
		}
		seen[name] = true
		return decodeGoValue(raw, at, field)
	})
}

func decodeGoMap(raw json.RawMessage, at string, v reflect.Value) error {
	v.Set(reflect.MakeMap(v.Type()))
	return forEachMember(raw, at, func(name string, raw json.RawMessage) error {
		at, key := joinPath(at, name), reflect.ValueOf(name)
		if v.MapIndex(key).IsValid() {
			return &FieldError{at, "is set twice"}
		}
		value, err := decodeElement(raw, at, v.Type().Elem())
		if err == nil {
			v.SetMapIndex(key, value)
		}
		return err
	})
}

func decodeSlice(raw json.RawMessage, at string, v reflect.Value) error {
	if raw[0] != '[' {
		return &FieldError{at, "must be a list, not " + jsonTypeOf(raw)}
	}
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		return &FieldError{at, "not valid JSON"}
	}
	list := reflect.MakeSlice(v.Type(), 0, len(items))
	for i, item := range items {
		value, err := decodeElement(item, at+"["+strconv.Itoa(i)+"]", v.Type().Elem())
		if err != nil {
			return err
		}
		list = reflect.Append(list, value)
	}
	v.Set(list)
	return nil
}

// decodeElement decodes an element of a JSON list or map, where null is not the same as absent.
func decodeElement(raw json.RawMessage, at string, t reflect.Type) (reflect.Value, error) {
	v := reflect.New(t).Elem()
	if string(raw) == "null" {
		return v, &FieldError{at, "must not be null"}
	}
	return v, decodeGoValue(raw, at, v)
}

// fieldNameOfPath returns the last field name of a JSON path; for a list element, the name of the list.
func fieldNameOfPath(at string) string {
	name := at[strings.LastIndexByte(at, '.')+1:]
	name, _, _ = strings.Cut(name, "[")
	return name
}

func readReference(raw json.RawMessage, at string, r *events.Reference) error {
	var err error
	var wrong *events.ReferenceError
	if raw[0] == '"' {
		var s string
		if s, err = readString(raw, at); err != nil {
			return err
		}
		if *r, err = events.ParseReference(s); err != nil {
			return &FieldError{at, err.Error()}
		}
	} else {
		var object events.ReferenceObject
		if err = decodeStruct(raw, at, reflect.ValueOf(&object).Elem()); err != nil {
			return err
		}
		if *r, err = object.CheckedReference(fieldNameOfPath(at)); errors.As(err, &wrong) {
			return &FieldError{joinPath(at, wrong.Field), wrong.Detail}
		}
	}
	if r.Scope == events.ScopeOrganization {
		r.Scope = ""
	}
	return nil
}
