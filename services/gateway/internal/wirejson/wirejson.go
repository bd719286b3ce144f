// Package wirejson is the JSON of the public API: messages of spool.v1, read
// strictly and written so that what an application gave comes back untouched
// (spool.v1.Json stands as itself). It knows the kinds of field that spool.v1
// has, and panics on others, which the test of the whole file would show.
package wirejson

import (
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// MaxDepth is how deep JSON may be nested.
const MaxDepth = 512

// FieldError says which field of a document is at fault, and why.
type FieldError struct {
	Field  string // path in the document; "" for the document itself
	Detail string // one sentence
}

func (e *FieldError) Error() string {
	if e.Field == "" {
		return e.Detail
	}
	return e.Field + ": " + e.Detail
}

var (
	jsonName      = (&spoolv1.Json{}).ProtoReflect().Descriptor().FullName()
	timestampName = (&timestamppb.Timestamp{}).ProtoReflect().Descriptor().FullName()
)

// isJSON tells whether a field holds spool.v1.Json.
func isJSON(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.MessageKind && fd.Message().FullName() == jsonName
}

// Time gives a time as the API writes it; nil for the zero time.
func Time(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// Raw dresses JSON text; nil for none.
func Raw(text string) *spoolv1.Json {
	if text == "" {
		return nil
	}
	return &spoolv1.Json{Text: text}
}
