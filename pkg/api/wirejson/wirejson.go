// Package wirejson implements the JSON of the public API, for the gateway and for its clients: messages of spool.v1 are
// decoded strictly by a server, and without errors for unknown fields by a client; they are encoded so that application
// data (spool.v1.Json) is returned unchanged. It supports the kinds of field that spool.v1 uses and
// panics on all others; a test that encodes every message would detect that.
package wirejson

import (
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// MaxDepth is the largest nesting depth of JSON.
const MaxDepth = 512

// FieldError reports an invalid field of a JSON document or of a query.
type FieldError struct {
	Field  string // path in the document; "" for the document itself
	Detail string // one sentence for the user
}

func (e *FieldError) Error() string {
	if e.Field == "" {
		return e.Detail
	}
	return e.Field + ": " + e.Detail
}

var (
	jsonMessageName      = (&spoolv1.Json{}).ProtoReflect().Descriptor().FullName()
	timestampMessageName = (&timestamppb.Timestamp{}).ProtoReflect().Descriptor().FullName()
)

// holdsRawJSON reports whether a field is a spool.v1.Json, which accepts any JSON.
func holdsRawJSON(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.MessageKind && fd.Message().FullName() == jsonMessageName
}

// TimestampOf converts a time to a protobuf timestamp; the zero time becomes nil.
func TimestampOf(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// JSONFromText converts JSON text to a spool.v1.Json message; the empty text becomes nil.
func JSONFromText(text string) *spoolv1.Json {
	if text == "" {
		return nil
	}
	return &spoolv1.Json{Text: text}
}
