package wirejson

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Marshal encodes a message as JSON: all fields in the order of the schema, except fields with presence that are not
// set.
func Marshal(m proto.Message) []byte {
	var w jsonWriter
	w.writeMessage(m.ProtoReflect())
	return w.Bytes()
}

// MarshalRequest encodes a message as Marshal does, but without fields that are 0, false, "" or empty: a server that
// does not know a field refuses the request only if the field is used.
func MarshalRequest(m proto.Message) []byte {
	w := jsonWriter{onlySet: true}
	w.writeMessage(m.ProtoReflect())
	return w.Bytes()
}

// jsonWriter builds the JSON text of a message.
type jsonWriter struct {
	bytes.Buffer
	onlySet bool // omit every field that has its default value
}

func (b *jsonWriter) writeMessage(m protoreflect.Message) {
	switch m.Descriptor().FullName() {
	case jsonMessageName:
		text := m.Get(m.Descriptor().Fields().ByNumber(1)).String()
		if text == "" {
			text = "null"
		}
		b.WriteString(text)
		return
	case timestampMessageName:
		t, ok := m.Interface().(*timestamppb.Timestamp)
		if !ok {
			panic("wirejson: a Timestamp of another package")
		}
		b.writeString(t.AsTime().Format(time.RFC3339Nano))
		return
	}
	b.WriteByte('{')
	first := true
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if b.isOmitted(m, fd) {
			continue
		}
		if !first {
			b.WriteByte(',')
		}
		first = false
		b.writeString(fd.JSONName())
		b.WriteByte(':')
		switch {
		case fd.IsList():
			b.writeList(fd, m.Get(fd).List())
			continue
		case fd.IsMap():
			b.writeMap(fd, m.Get(fd).Map())
			continue
		}
		b.writeValue(fd, m.Get(fd))
	}
	b.WriteByte('}')
}

// optionalLists are the list fields that are omitted when empty, as in the stored JSON of a block.
var optionalLists = map[protoreflect.FullName]bool{
	"spool.v1.Block.parts": true, "spool.v1.Block.todos": true, "spool.v1.Plan.items": true, "spool.v1.Step.depends_on": true,
}

func (b *jsonWriter) isOmitted(m protoreflect.Message, fd protoreflect.FieldDescriptor) bool {
	if b.onlySet {
		return !m.Has(fd)
	}
	if fd.IsList() {
		return optionalLists[fd.FullName()] && m.Get(fd).List().Len() == 0
	}
	return fd.HasPresence() && !m.Has(fd)
}

func (b *jsonWriter) writeList(fd protoreflect.FieldDescriptor, list protoreflect.List) {
	b.WriteByte('[')
	for i := range list.Len() {
		if i > 0 {
			b.WriteByte(',')
		}
		b.writeValue(fd, list.Get(i))
	}
	b.WriteByte(']')
}

// writeMap encodes a map field as an object whose members are sorted by name.
func (b *jsonWriter) writeMap(fd protoreflect.FieldDescriptor, m protoreflect.Map) {
	var names []string
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		names = append(names, k.String())
		return true
	})
	slices.Sort(names)
	b.WriteByte('{')
	for i, name := range names {
		if i > 0 {
			b.WriteByte(',')
		}
		b.writeString(name)
		b.WriteByte(':')
		b.writeValue(fd.MapValue(), m.Get(protoreflect.ValueOfString(name).MapKey()))
	}
	b.WriteByte('}')
}

func (b *jsonWriter) writeValue(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		b.writeString(v.String())
	case protoreflect.BoolKind:
		b.WriteString(strconv.FormatBool(v.Bool()))
	case protoreflect.Uint32Kind:
		b.WriteString(strconv.FormatUint(v.Uint(), 10))
	case protoreflect.DoubleKind:
		b.writeScalar(v.Float())
	case protoreflect.MessageKind:
		b.writeMessage(v.Message())
	default:
		panic(fmt.Sprintf("wirejson: %s is a %s, which the API does not use", fd.FullName(), fd.Kind()))
	}
}

func (b *jsonWriter) writeString(s string) { b.writeScalar(s) }

// writeScalar encodes a number, a boolean or a string without HTML escapes, as the JSON of the log has none.
func (b *jsonWriter) writeScalar(v any) {
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // NaN or infinity is not a JSON number
		b.WriteString("null")
		return
	}
	b.Truncate(b.Len() - 1)
}
