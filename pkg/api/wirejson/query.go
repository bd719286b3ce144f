package wirejson

import (
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/spoolhq/spool/pkg/truncate"
)

// CheckQuery checks the query parameters of a REST request. It returns a *FieldError unless every parameter is a field
// of the message that is not in the path, has the right type, and is given once (except lists).
func CheckQuery(q url.Values, d protoreflect.MessageDescriptor, inPath func(field string) bool) error {
	var names []string
	for i := range d.Fields().Len() {
		if fd := d.Fields().Get(i); !inPath(string(fd.Name())) && fd.Kind() != protoreflect.MessageKind {
			names = append(names, fd.JSONName())
		}
	}
	for name, values := range q {
		fd := d.Fields().ByJSONName(name)
		if fd == nil || inPath(string(fd.Name())) || fd.Kind() == protoreflect.MessageKind {
			return &FieldError{joinPath("", name), "unknown parameter; " + listParameters(names)}
		}
		if len(values) > 1 && !fd.IsList() {
			return &FieldError{name, "the parameter is given more than once"}
		}
		for _, v := range values {
			if err := checkParameter(name, v, fd.Kind()); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkParameter(name, v string, kind protoreflect.Kind) error {
	switch kind {
	case protoreflect.Uint32Kind:
		if _, err := ParseCursor(name, v); err != nil {
			return err
		}
	case protoreflect.BoolKind:
		if _, err := ParseBool(name, v); err != nil {
			return err
		}
	default:
		if !utf8.ValidString(v) {
			return &FieldError{name, "the text is not valid UTF-8"}
		}
	}
	return nil
}

// ParseCursor parses the cursor of a query parameter, an unsigned 32-bit number. The error is a *FieldError that names
// the parameter.
func ParseCursor(name, v string) (uint32, error) { return parseNumber(name, v, 0) }

// ParseSeq parses the seq of an event, which is at least 1. The error is a *FieldError that names the parameter.
func ParseSeq(name, v string) (uint32, error) { return parseNumber(name, v, 1) }

func parseNumber(name, v string, least uint64) (uint32, error) {
	n, err := strconv.ParseUint(v, 10, 32)
	if err != nil || n < least {
		return 0, &FieldError{name, "must be a whole number from " + strconv.FormatUint(least, 10) + " to 4294967295, not " + truncate.Quote(v, 40)}
	}
	return uint32(n), nil
}

// ParseBool parses a query parameter that is true or false, or 1 or 0. The error is a *FieldError that names the
// parameter.
func ParseBool(name, v string) (bool, error) {
	switch v {
	case "1", "true":
		return true, nil
	case "0", "false":
		return false, nil
	}
	return false, &FieldError{name, "must be true or false, 1 or 0, not " + truncate.Quote(v, 40)}
}

func listParameters(names []string) string {
	if len(names) == 0 {
		return "this route has no parameters"
	}
	return "must be one of " + strings.Join(names, ", ")
}
