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

// Marshal encodes a message: its fields in order, without absent fields that have presence.
func Marshal(m proto.Message) []byte {
	var b bytes.Buffer
	writeMessage(&b, m.ProtoReflect())
	return b.Bytes()
}

func writeMessage(b *bytes.Buffer, m protoreflect.Message) {
	switch m.Descriptor().FullName() {
	case jsonName:
		text := m.Get(m.Descriptor().Fields().ByNumber(1)).String()
		if text == "" {
			text = "null"
		}
		b.WriteString(text)
		return
	case timestampName:
		t, ok := m.Interface().(*timestamppb.Timestamp)
		if !ok {
			panic("wirejson: a Timestamp of another package")
		}
		writeString(b, t.AsTime().Format(time.RFC3339Nano))
		return
	}
	b.WriteByte('{')
	first := true
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if absent(m, fd) {
			continue
		}
		if !first {
			b.WriteByte(',')
		}
		first = false
		writeString(b, fd.JSONName())
		b.WriteByte(':')
		switch {
		case fd.IsList():
			writeList(b, fd, m.Get(fd).List())
			continue
		case fd.IsMap():
			writeMap(b, fd, m.Get(fd).Map())
			continue
		}
		writeValue(b, fd, m.Get(fd))
	}
	b.WriteByte('}')
}

// optionalLists are lists that are omitted when empty, as in the stored JSON of a block.
var optionalLists = map[protoreflect.FullName]bool{"spool.v1.Block.parts": true, "spool.v1.Block.todos": true}

func absent(m protoreflect.Message, fd protoreflect.FieldDescriptor) bool {
	if fd.IsList() {
		return optionalLists[fd.FullName()] && m.Get(fd).List().Len() == 0
	}
	return fd.HasPresence() && !m.Has(fd)
}

func writeList(b *bytes.Buffer, fd protoreflect.FieldDescriptor, list protoreflect.List) {
	b.WriteByte('[')
	for i := range list.Len() {
		if i > 0 {
			b.WriteByte(',')
		}
		writeValue(b, fd, list.Get(i))
	}
	b.WriteByte(']')
}

// writeMap encodes members sorted by name.
func writeMap(b *bytes.Buffer, fd protoreflect.FieldDescriptor, m protoreflect.Map) {
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
		writeString(b, name)
		b.WriteByte(':')
		writeValue(b, fd.MapValue(), m.Get(protoreflect.ValueOfString(name).MapKey()))
	}
	b.WriteByte('}')
}

func writeValue(b *bytes.Buffer, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		writeString(b, v.String())
	case protoreflect.BoolKind:
		b.WriteString(strconv.FormatBool(v.Bool()))
	case protoreflect.Uint32Kind:
		b.WriteString(strconv.FormatUint(v.Uint(), 10))
	case protoreflect.DoubleKind:
		writeAny(b, v.Float())
	case protoreflect.MessageKind:
		writeMessage(b, v.Message())
	default:
		panic(fmt.Sprintf("wirejson: %s is a %s, which the API does not use", fd.FullName(), fd.Kind()))
	}
}

func writeString(b *bytes.Buffer, s string) { writeAny(b, s) }

// writeAny encodes without HTML escapes, like the log.
func writeAny(b *bytes.Buffer, v any) {
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // NaN or infinity is not a JSON number
		b.WriteString("null")
		return
	}
	b.Truncate(b.Len() - 1)
}
