package rest

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
)

// codec implements runtime.Marshaler of grpc-gateway for messages of spool.v1. It encodes and decodes them with package
// wirejson.
type codec struct{}

// errNoMessage is returned for a Go value that is not a message of spool.v1.
var errNoMessage = errors.New("not a message of spool.v1")

// Marshal encodes a message.
func (codec) Marshal(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T: %w", v, errNoMessage)
	}
	return append(wirejson.Marshal(m), '\n'), nil
}

// Unmarshal decodes a message.
func (codec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T: %w", v, errNoMessage)
	}
	return wirejson.Unmarshal(data, m)
}

// NewDecoder returns a decoder of one message, which must be the whole body. An empty body is an empty message.
func (c codec) NewDecoder(r io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(v any) error {
		b, ok := r.(*requestBody)
		if !ok {
			return fmt.Errorf("%T: %w", r, errNoMessage)
		}
		if len(bytes.TrimSpace(b.data)) == 0 {
			return io.EOF
		}
		b.err = c.Unmarshal(b.data, v)
		if b.err == nil {
			b.err = b.checkPathFields(v)
		}
		if b.err == nil {
			b.err = b.setQueryParameters(v)
		}
		return b.err
	})
}

// checkPathFields returns an error if the body of a request sets a field that the path contains.
func (b *requestBody) checkPathFields(v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return nil
	}
	for name := range b.inPath {
		fd := m.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
		if fd != nil && m.ProtoReflect().Has(fd) {
			return &wirejson.FieldError{Field: fd.JSONName(), Detail: "the field must be in the path and not in the body"}
		}
	}
	return nil
}

// setQueryParameters sets the fields of the message v that are parameters of the query. It returns an error if the
// body sets one of them.
func (b *requestBody) setQueryParameters(v any) error {
	message, ok := v.(proto.Message)
	if !ok {
		return nil
	}
	m := message.ProtoReflect()
	for i := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(i)
		if !spoolv1.IsQueryParameter(fd.FullName()) {
			continue
		}
		if m.Has(fd) {
			return &wirejson.FieldError{Field: fd.JSONName(), Detail: "the field must be a parameter of the query and not in the body"}
		}
		m.Set(fd, protoreflect.ValueOfString(b.query.Get(fd.JSONName())))
	}
	return nil
}

// NewEncoder returns an encoder of messages.
func (c codec) NewEncoder(w io.Writer) runtime.Encoder {
	return runtime.EncoderFunc(func(v any) error {
		b, err := c.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	})
}

// ContentType returns application/json.
func (codec) ContentType(any) string { return "application/json" }
