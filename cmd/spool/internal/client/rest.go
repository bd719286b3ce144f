package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
)

// APIObject is an object in a response of the API: its decoded Value, and Raw, its JSON as the server sent it. Raw may
// have fields that this version of the client does not know. An APIObject is encoded as Raw. T is a pointer to a
// generated message, or a type that encoding/json decodes.
type APIObject[T any] struct {
	Raw   json.RawMessage
	Value T
}

// UnmarshalJSON sets Raw and Value from the JSON of the object.
func (d *APIObject[T]) UnmarshalJSON(b []byte) error {
	d.Raw = bytes.Clone(b)
	message, ok := any(d.Value).(proto.Message)
	if !ok {
		return json.Unmarshal(b, &d.Value)
	}
	message = message.ProtoReflect().New().Interface()
	d.Value, _ = message.(T) // New returns a message of the same type
	return wirejson.UnmarshalResponse(b, message)
}

// MarshalJSON returns Raw.
func (d APIObject[T]) MarshalJSON() ([]byte, error) { return d.Raw, nil }

// Method is a method of a generated client of a service, such as Client.Sessions.GetSession. Q is its request and R
// its response.
type Method[Q, R any] func(context.Context, *Q, ...grpc.CallOption) (*R, error)

// Call calls a method of the API over REST. The error is an *Error, an *UnreachableError or that of ctx.
func Call[Q, R any](ctx context.Context, method Method[Q, R], request *Q) (doc APIObject[*R], err error) {
	doc.Value, err = method(ctx, request, rawResponseOption{raw: &doc.Raw})
	return doc, err
}

// List yields the items of all pages that a list method of the API returns. T is the message of an item.
func List[T proto.Message, Q, R any](ctx context.Context, method Method[Q, R], request *Q) iter.Seq2[APIObject[T], error] {
	return func(yield func(APIObject[T], error) bool) {
		message := any(request).(proto.Message).ProtoReflect() // generated clients take messages
		for {
			page, err := Call(ctx, method, request)
			if err != nil {
				yield(APIObject[T]{}, err)
				return
			}
			response := any(page.Value).(proto.Message).ProtoReflect() // generated clients return messages
			items, err := decodePageItems[T](page.Raw, response.Descriptor())
			if err != nil {
				yield(APIObject[T]{}, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			next := response.Descriptor().Fields().ByName("next_page_token")
			if next == nil || response.Get(next).String() == "" {
				return
			}
			message.Set(message.Descriptor().Fields().ByName("page_token"), response.Get(next))
		}
	}
}

// decodePageItems decodes the items in a page of a list method.
func decodePageItems[T proto.Message](raw json.RawMessage, page protoreflect.MessageDescriptor) (items []APIObject[T], err error) {
	var item T
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil, fmt.Errorf("decode a list: %w", err)
	}
	for i := range page.Fields().Len() {
		fd := page.Fields().Get(i)
		if fd.Message() != nil && fd.Message().FullName() == item.ProtoReflect().Descriptor().FullName() && members[fd.JSONName()] != nil {
			if err := json.Unmarshal(members[fd.JSONName()], &items); err != nil {
				return nil, fmt.Errorf("decode a list: %w", err)
			}
		}
	}
	return items, nil
}

// ConvertStored converts a message of the API that contains an event or a block to events.WireEvent or events.Block, which
// have the same JSON.
func ConvertStored[T any](m proto.Message) (stored T, err error) {
	if err := json.Unmarshal(wirejson.Marshal(m), &stored); err != nil {
		return stored, fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return stored, nil
}

// rawResponseOption is a grpc.CallOption with which restConn.Invoke stores the JSON of the response in raw.
type rawResponseOption struct {
	grpc.EmptyCallOption
	raw *json.RawMessage
}

// restConn is a grpc.ClientConnInterface that calls methods over REST, with the routes that are annotated in
// spool.proto. The generated clients of spool.v1 use it.
type restConn struct{ client *Client }

// Invoke calls a method such as "/spool.v1.Sessions/GetSession" over REST. request and response are messages of
// spool.v1.
func (r restConn) Invoke(ctx context.Context, method string, request, response any, options ...grpc.CallOption) error {
	in, isMessage := request.(proto.Message)
	out, ok := response.(proto.Message)
	if !isMessage || !ok {
		return fmt.Errorf("%s: %T and %T are not messages", method, request, response)
	}
	call, err := newCall(method, in)
	if err != nil {
		return err
	}
	raw, err := r.client.sendWithRetries(ctx, call)
	if err != nil {
		return err
	}
	for _, option := range options {
		if o, ok := option.(rawResponseOption); ok {
			*o.raw = raw
		}
	}
	return r.client.wrapDecodeError(wirejson.UnmarshalResponse(raw, out))
}

// NewStream always returns an error. Over HTTP, events are streamed by SSE and WebSocket, which Replay and Follow use.
func (restConn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errors.ErrUnsupported
}

// newCall returns the HTTP request of a method of spool.v1. Fields of the message that are not in the path become the
// body or the query, as the annotation of the method in spool.proto states.
func newCall(method string, request proto.Message) (apiCall, error) {
	c := apiCall{repeatable: isRepeatable(method)}
	descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(method[1:], "/", ".")))
	if err != nil {
		return c, fmt.Errorf("%s: %w", method, err)
	}
	rule, ok := proto.GetExtension(descriptor.Options(), annotations.E_Http).(*annotations.HttpRule)
	if !ok || rule == nil {
		return c, fmt.Errorf("%s: the method has no route", method)
	}
	pattern := rule.ProtoReflect().WhichOneof(rule.ProtoReflect().Descriptor().Oneofs().ByName("pattern"))
	c.method = strings.ToUpper(string(pattern.Name()))
	if c.repeatable && c.method == http.MethodPost {
		c.key = rand.Text()
	}
	message := proto.Clone(request).ProtoReflect()
	for segment := range strings.SplitSeq(rule.ProtoReflect().Get(pattern).String()[1:], "/") {
		if strings.HasPrefix(segment, "{") {
			fd := message.Descriptor().Fields().ByName(protoreflect.Name(strings.Trim(segment, "{}")))
			segment = message.Get(fd).String()
			message.Clear(fd)
		}
		c.path = append(c.path, segment)
	}
	c.query = url.Values{}
	if rule.GetBody() != "" {
		c.moveQueryParameters(message)
		c.body = wirejson.MarshalRequest(message.Interface())
		return c, nil
	}
	message.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if !fd.IsList() {
			c.query.Set(fd.JSONName(), v.String())
			return true
		}
		for i := range v.List().Len() {
			c.query.Add(fd.JSONName(), v.List().Get(i).String())
		}
		return true
	})
	return c, nil
}

// moveQueryParameters moves the fields that are query parameters over REST from the message, which becomes the body, to
// the query. It sets c.wait from the field wait, the time for which the server may delay its response.
func (c *apiCall) moveQueryParameters(message protoreflect.Message) {
	message.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if spoolv1.IsQueryParameter(fd.FullName()) {
			c.query.Set(fd.JSONName(), v.String())
			c.wait, _ = time.ParseDuration(v.String()) // the server refuses another text
			message.Clear(fd)
		}
		return true
	})
}

// isRepeatable reports whether repeating a call of a method with the same request and the same Idempotency-Key changes
// nothing.
func isRepeatable(method string) bool {
	switch method {
	case spoolv1.Sessions_InterruptSession_FullMethodName, // the second one could interrupt the next turn
		spoolv1.Sessions_TerminateEnvironment_FullMethodName, // the second one could end the next sandbox
		spoolv1.Keys_CreateKey_FullMethodName,                // each call creates a key
		spoolv1.DeadLetters_RetryDeadLetter_FullMethodName:   // the first call removes the letter
		return false
	}
	return true
}
