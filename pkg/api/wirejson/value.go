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
			path = join(path, deep.Field)
		}
		return &FieldError{path, deep.Detail}
	}
	if data = bytes.TrimSpace(data); len(data) == 0 || !json.Valid(data) {
		return &FieldError{path, "not valid JSON"}
	}
	return readGo(data, path, reflect.ValueOf(into).Elem())
}

// readGo decodes one value; null is the same as absent.
func readGo(raw json.RawMessage, at string, v reflect.Value) error {
	if string(raw) == "null" {
		return nil
	}
	if r, ok := v.Addr().Interface().(*events.Reference); ok {
		return readReference(raw, at, r)
	}
	switch v.Kind() {
	case reflect.Struct:
		return readStruct(raw, at, v)
	case reflect.Map:
		return readGoMap(raw, at, v)
	case reflect.Slice:
		return readSlice(raw, at, v)
	case reflect.String:
		if raw[0] != '"' {
			return &FieldError{at, "must be a string, not " + typeOf(raw)}
		}
		s, err := readString(raw, at)
		v.SetString(s)
		return err
	case reflect.Bool:
		if s := string(raw); s != "true" && s != "false" {
			return wrongType(at, "true or false", raw)
		}
		v.SetBool(raw[0] == 't')
		return nil
	case reflect.Uint32:
		n, err := strconv.ParseUint(string(raw), 10, 32)
		if err != nil {
			return wrongType(at, "a whole number from 0 to 4294967295", raw)
		}
		v.SetUint(n)
		return nil
	case reflect.Float64:
		n, err := strconv.ParseFloat(string(raw), 64)
		if err != nil {
			return wrongType(at, "a number", raw)
		}
		v.SetFloat(n)
		return nil
	}
	panic(fmt.Sprintf("wirejson: %s is a %s, which no definition uses", at, v.Type()))
}

func readStruct(raw json.RawMessage, at string, v reflect.Value) error {
	fields := map[string]reflect.Value{}
	var names []string
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		fields[name], names = v.Field(i), append(names, name)
	}
	seen := map[string]bool{}
	return eachMember(raw, at, func(name string, raw json.RawMessage) error {
		at := join(at, name)
		field, ok := fields[name]
		switch {
		case !ok:
			return &FieldError{at, "unknown field; must be one of " + strings.Join(names, ", ")}
		case seen[name]:
			return &FieldError{at, "is set twice"}
		}
		seen[name] = true
		return readGo(raw, at, field)
	})
}

func readGoMap(raw json.RawMessage, at string, v reflect.Value) error {
	v.Set(reflect.MakeMap(v.Type()))
	return eachMember(raw, at, func(name string, raw json.RawMessage) error {
		at, key := join(at, name), reflect.ValueOf(name)
		if v.MapIndex(key).IsValid() {
			return &FieldError{at, "is set twice"}
		}
		value, err := readElement(raw, at, v.Type().Elem())
		if err == nil {
			v.SetMapIndex(key, value)
		}
		return err
	})
}

func readSlice(raw json.RawMessage, at string, v reflect.Value) error {
	if raw[0] != '[' {
		return &FieldError{at, "must be a list, not " + typeOf(raw)}
	}
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		return &FieldError{at, "not valid JSON"}
	}
	list := reflect.MakeSlice(v.Type(), 0, len(items))
	for i, item := range items {
		value, err := readElement(item, at+"["+strconv.Itoa(i)+"]", v.Type().Elem())
		if err != nil {
			return err
		}
		list = reflect.Append(list, value)
	}
	v.Set(list)
	return nil
}

// readElement decodes an element of a list or map, where null is not the same as absent.
func readElement(raw json.RawMessage, at string, t reflect.Type) (reflect.Value, error) {
	v := reflect.New(t).Elem()
	if string(raw) == "null" {
		return v, &FieldError{at, "must not be null"}
	}
	return v, readGo(raw, at, v)
}

// fieldName returns the name of the field at a path; for a list element, the name of the list.
func fieldName(at string) string {
	name := at[strings.LastIndexByte(at, '.')+1:]
	name, _, _ = strings.Cut(name, "[")
	return name
}

// readReference decodes a reference in string or object form. The organization scope becomes "".
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
		if err = readStruct(raw, at, reflect.ValueOf(&object).Elem()); err != nil {
			return err
		}
		if *r, err = object.CheckedReference(fieldName(at)); errors.As(err, &wrong) {
			return &FieldError{join(at, wrong.Field), wrong.Detail}
		}
	}
	if r.Scope == events.ScopeOrganization {
		r.Scope = ""
	}
	return nil
}
