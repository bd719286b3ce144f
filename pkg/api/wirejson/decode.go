package wirejson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// maxListItems is the largest number of entries of a list.
const maxListItems = 20_000

// Unmarshal decodes a JSON object into a message. The object may contain only fields of the message, under their JSON
// names, each once and with the right type. null is the same as absent, except for fields that accept any JSON. The
// error is a *FieldError.
func Unmarshal(data []byte, m proto.Message) error {
	if err := CheckDepth(data); err != nil {
		return err
	}
	return messageDecoder{}.decodeMessage(data, "", m.ProtoReflect())
}

// UnmarshalResponse decodes a JSON object into a message as Unmarshal does, but ignores unknown fields, so that a
// client understands a newer server. The error is a *FieldError.
func UnmarshalResponse(data []byte, m proto.Message) error {
	return messageDecoder{ignoreUnknown: true}.decodeMessage(data, "", m.ProtoReflect())
}

// messageDecoder decodes JSON into protobuf messages, strictly or with unknown fields ignored.
type messageDecoder struct {
	ignoreUnknown bool // ignore fields that a message does not have
}

func (r messageDecoder) decodeMessage(data []byte, path string, m protoreflect.Message) error {
	seen := map[string]bool{}
	return forEachMember(data, path, func(name string, raw json.RawMessage) error {
		at := joinPath(path, name)
		fd := m.Descriptor().Fields().ByJSONName(name)
		if fd == nil {
			if r.ignoreUnknown {
				return nil
			}
			return &FieldError{at, "unknown field; " + listAllowedFields(m.Descriptor())}
		}
		if seen[name] {
			return &FieldError{at, "is set twice"}
		}
		seen[name] = true
		if !utf8.Valid(raw) {
			return &FieldError{at, "the text is not valid UTF-8"}
		}
		return r.decodeField(raw, at, m, fd)
	})
}

func (r messageDecoder) decodeField(raw json.RawMessage, at string, m protoreflect.Message, fd protoreflect.FieldDescriptor) error {
	if string(raw) == "null" && !holdsRawJSON(fd) {
		return nil
	}
	if fd.IsMap() {
		return r.decodeMap(raw, at, m.Mutable(fd).Map(), fd.MapValue())
	}
	if !fd.IsList() {
		v, err := r.decodeValue(raw, at, m.NewField(fd), fd)
		if err == nil {
			m.Set(fd, v)
		}
		return err
	}
	if raw[0] != '[' {
		return wrongTypeError(at, "a list", raw)
	}
	items := json.NewDecoder(bytes.NewReader(raw))
	if _, err := items.Token(); err != nil {
		return &FieldError{at, "not valid JSON"}
	}
	list := m.Mutable(fd).List()
	for i := 0; items.More(); i++ {
		// An empty entry takes three bytes of JSON, and more than a hundred in memory.
		if i == maxListItems {
			return &FieldError{at, "a list has at most " + strconv.Itoa(maxListItems) + " entries"}
		}
		var item json.RawMessage
		if err := items.Decode(&item); err != nil {
			return &FieldError{at, "not valid JSON"}
		}
		v, err := r.decodeValue(item, at+"["+strconv.Itoa(i)+"]", list.NewElement(), fd)
		if err != nil {
			return err
		}
		list.Append(v)
	}
	return nil
}

// decodeMap decodes a JSON object with arbitrary member names into a map field.
func (r messageDecoder) decodeMap(raw json.RawMessage, at string, into protoreflect.Map, fd protoreflect.FieldDescriptor) error {
	return forEachMember(raw, at, func(name string, raw json.RawMessage) error {
		key, at := protoreflect.ValueOfString(name).MapKey(), joinPath(at, name)
		if into.Has(key) {
			return &FieldError{at, "is set twice"}
		}
		v, err := r.decodeValue(raw, at, into.NewValue(), fd)
		if err == nil {
			into.Set(key, v)
		}
		return err
	})
}

// decodeValue decodes the JSON value of a message's field; zero is an empty value of the field's type.
func (r messageDecoder) decodeValue(raw json.RawMessage, at string, zero protoreflect.Value, fd protoreflect.FieldDescriptor) (protoreflect.Value, error) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		if raw[0] != '"' && spoolv1.HoldsReference(fd.FullName()) {
			return decodeReferenceObject(raw, at)
		}
		if raw[0] != '"' && isRedacted(fd) {
			return zero, &FieldError{at, "must be a string, not " + jsonTypeOf(raw)}
		}
		s, err := readString(raw, at)
		return protoreflect.ValueOfString(s), err
	case protoreflect.BoolKind:
		if s := string(raw); s != "true" && s != "false" {
			return zero, wrongTypeError(at, "true or false", raw)
		}
		return protoreflect.ValueOfBool(raw[0] == 't'), nil
	case protoreflect.Uint32Kind:
		n, err := strconv.ParseUint(string(raw), 10, 32)
		if err != nil {
			return zero, wrongTypeError(at, "a whole number from 0 to 4294967295", raw)
		}
		return protoreflect.ValueOfUint32(uint32(n)), nil
	case protoreflect.DoubleKind:
		n, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || raw[0] == '"' { // a JSON number is finite unless it is too large
			return zero, wrongTypeError(at, "a number", raw)
		}
		return protoreflect.ValueOfFloat64(n), nil
	case protoreflect.MessageKind:
		switch fd.Message().FullName() {
		case jsonMessageName:
			return decodeRawJSON(raw, at)
		case timestampMessageName:
			return readTime(raw, at)
		}
		return zero, r.decodeMessage(raw, at, zero.Message())
	}
	panic(fmt.Sprintf("wirejson: %s is a %s, which no request uses", fd.FullName(), fd.Kind()))
}

// decodeReferenceObject decodes a catalogue reference that is a JSON object, and returns the reference as a string.
func decodeReferenceObject(raw json.RawMessage, at string) (protoreflect.Value, error) {
	var r events.Reference
	if raw[0] != '{' {
		return protoreflect.Value{}, wrongTypeError(at, "a reference, which is a string or an object", raw)
	}
	err := readReference(raw, at, &r)
	return protoreflect.ValueOfString(r.String()), err
}

func readString(raw json.RawMessage, at string) (string, error) {
	if raw[0] != '"' {
		return "", wrongTypeError(at, "a string", raw)
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1]), nil // the text was scanned and is UTF-8, so a large file need not be scanned again
	}
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", &FieldError{at, "not valid JSON"}
	}
	// encoding/json replaces an escaped half of a surrogate pair with U+FFFD; text must not be changed.
	if n := strings.Count(s, "\uFFFD"); n > bytes.Count(raw, []byte("\uFFFD"))+bytes.Count(bytes.ToLower(raw), []byte(`\ufffd`)) {
		return "", &FieldError{at, `the text holds half of a surrogate pair (\ud800 to \udfff)`}
	}
	return s, nil
}

func decodeRawJSON(raw json.RawMessage, at string) (protoreflect.Value, error) {
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		return protoreflect.Value{}, &FieldError{at, "not valid JSON"}
	}
	return protoreflect.ValueOfMessage((&spoolv1.Json{Text: b.String()}).ProtoReflect()), nil
}

// readTime decodes a time in RFC 3339.
func readTime(raw json.RawMessage, at string) (protoreflect.Value, error) {
	var t time.Time
	if err := json.Unmarshal(raw, &t); err != nil {
		return protoreflect.Value{}, wrongTypeError(at, "a time in RFC 3339", raw)
	}
	return protoreflect.ValueOfMessage(timestamppb.New(t).ProtoReflect()), nil
}

// forEachMember calls member with the name and the raw JSON of each member of an object.
func forEachMember(data []byte, path string, member func(string, json.RawMessage) error) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	token, err := dec.Token()
	if err != nil {
		return syntaxError(err, path)
	}
	if token != json.Delim('{') {
		return wrongTypeError(path, "an object", bytes.TrimSpace(data))
	}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return syntaxError(err, path)
		}
		name, ok := token.(string)
		if !ok {
			return &FieldError{path, "not valid JSON: a name is expected"}
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return syntaxError(err, joinPath(path, name))
		}
		if err := member(name, raw); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return syntaxError(err, path)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return &FieldError{path, "not valid JSON: there is data after the object"}
	}
	return nil
}

func syntaxError(err error, path string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &FieldError{path, "not valid JSON: unexpected end"}
	}
	return &FieldError{path, "not valid JSON: " + strings.TrimPrefix(err.Error(), "json: ")}
}

// CheckDepth refuses deeply nested JSON before any recursive function sees it. It counts brackets outside strings,
// which is exact for valid JSON. The error is a *FieldError that names the top-level member.
func CheckDepth(data []byte) error {
	depth, inString, member := 0, false, ""
	start := 0
	for i := 0; i < len(data); i++ {
		c := data[i]
		switch {
		case inString && c == '\\':
			i++
		case inString && c == '"':
			inString = false
			if depth == 1 && i-start < 100 {
				member = string(bytes.ToValidUTF8(data[start+1:i], nil)) // the last string at the top level is the name of the present member
			}
		case inString:
		case c == '"':
			inString, start = true, i
		case c == '{' || c == '[':
			if depth++; depth > MaxDepth {
				return &FieldError{member, fmt.Sprintf("nested deeper than %d levels", MaxDepth)}
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

func wrongTypeError(at, want string, raw []byte) error {
	if len(raw) == 0 {
		return &FieldError{at, "must be " + want}
	}
	got := jsonTypeOf(raw)
	if got == numberType && len(raw) <= 24 {
		got = string(raw)
	}
	return &FieldError{at, "must be " + want + ", not " + got}
}

const numberType = "a number"

// jsonTypeOf returns the name of a JSON value's type, such as "a string", for errors that must not contain the value.
func jsonTypeOf(raw []byte) string {
	switch raw[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f':
		return "true or false"
	case 'n':
		return "null"
	}
	return numberType
}

// isRedacted reports whether a field is sensitive, so that errors must not contain its value.
func isRedacted(fd protoreflect.FieldDescriptor) bool {
	o, ok := fd.Options().(*descriptorpb.FieldOptions)
	return ok && o.GetDebugRedact()
}

func joinPath(path, name string) string {
	name = truncate.ValidText(name, 64)
	if path == "" {
		return name
	}
	return path + "." + name
}

// listAllowedFields returns the names of the fields that a JSON object of the message may have, for an error. Fields
// that REST clients send in the query are left out.
func listAllowedFields(d protoreflect.MessageDescriptor) string {
	var names []string
	for i := range d.Fields().Len() {
		if fd := d.Fields().Get(i); !spoolv1.IsQueryParameter(fd.FullName()) {
			names = append(names, fd.JSONName())
		}
	}
	return "must be one of " + strings.Join(names, ", ")
}
