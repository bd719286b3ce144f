package server

import (
	"context"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// calls counts the calls of each method, and holds the faults that tests have injected and the violations that were
// found.
type calls struct {
	mu         sync.Mutex
	counts     map[string]int // by method, without its service
	faults     []*fault
	violations []violation
}

// fault is an error that a test has injected into calls of a method.
type fault struct {
	Method  string `json:"method"`
	Code    string `json:"code"` // as in gRPC: UNAVAILABLE
	Message string `json:"message"`
	Count   int    `json:"count"` // of calls; negative: until the faults are cleared
	After   bool   `json:"after"` // the call takes effect before it fails
	// RetryAfterSeconds asks the client to repeat the call after that time, as
	// Modal does to slow clients down.
	RetryAfterSeconds float32 `json:"retryAfterSeconds"`
	code              codes.Code
}

// violation is a request that the real Modal would refuse, or that mockmodal
// does not implement.
type violation struct {
	Time   time.Time `json:"time"`
	Method string    `json:"method"`
	What   string    `json:"what"`
}

// count counts a call of a method.
func (c *calls) count(method string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = map[string]int{}
	}
	c.counts[method]++
}

// addFault makes calls fail as f describes, from now on.
func (c *calls) addFault(f fault) error {
	if err := f.code.UnmarshalJSON([]byte(`"` + f.Code + `"`)); err != nil || f.code == codes.OK {
		return fmt.Errorf("code %q is not a gRPC error code", f.Code)
	}
	if f.Method == "" || f.Count == 0 {
		return fmt.Errorf("method and count are required")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = append(c.faults, &f)
	return nil
}

// nextFault returns the error that a test has injected into this call, or nil. after selects the faults that let a call
// take effect before it fails.
func (c *calls) nextFault(method string, after bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.faults {
		if f.Method != method || f.After != after || f.Count == 0 {
			continue
		}
		if f.Count > 0 {
			f.Count--
		}
		failed := status.New(f.code, f.Message)
		if f.RetryAfterSeconds > 0 {
			policy := pb.RPCRetryPolicy_builder{RetryAfterSecs: f.RetryAfterSeconds}.Build()
			if detailed, err := failed.WithDetails(policy); err == nil {
				failed = detailed
			}
		}
		return failed.Err()
	}
	return nil
}

// recordViolation records that a client called a method in a way that Modal would not accept.
func (c *calls) recordViolation(method, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.violations = append(c.violations, violation{time.Now().UTC(), method, what})
}

// admit counts a call, checks its token, and returns an error that a test has injected. It is called before the first
// message of the call is read.
func (s *Server) admit(ctx context.Context, fullMethod string, isStream bool) error {
	s.calls.count(path.Base(fullMethod))
	if err := s.authenticate(ctx, fullMethod, isStream); err != nil {
		return err
	}
	return s.calls.nextFault(path.Base(fullMethod), false)
}

// finishCall is called with the result err of a call, and returns the error for the client. It records a violation if
// err means that something is not implemented. If err is nil, it returns an error that a test has injected to follow
// the effect of the call.
func (s *Server) finishCall(method string, err error) error {
	if status.Code(err) == codes.Unimplemented {
		s.calls.recordViolation(method, status.Convert(err).Message())
	}
	if err == nil {
		err = s.calls.nextFault(method, true)
	}
	return err
}

// interceptUnary is the interceptor of unary calls.
func (s *Server) interceptUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	if err := s.admit(ctx, info.FullMethod, false); err != nil {
		return nil, err
	}
	if err := s.checkUnknown(method, request); err != nil {
		return nil, err
	}
	response, err := handle(ctx, request)
	if err := s.finishCall(method, err); err != nil {
		return nil, err
	}
	return response, nil
}

// interceptStream is the interceptor of streaming calls.
func (s *Server) interceptStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := s.admit(stream.Context(), info.FullMethod, true); err != nil {
		return err
	}
	method := path.Base(info.FullMethod)
	return s.finishCall(method, handle(service, &checkedStream{stream, s, method}))
}

// checkedStream is a gRPC stream that refuses messages with fields that the server does not know.
type checkedStream struct {
	grpc.ServerStream
	server *Server
	method string
}

// RecvMsg implements grpc.ServerStream.
func (c *checkedStream) RecvMsg(message any) error {
	if err := c.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	return c.server.checkUnknown(c.method, message)
}

// refuseUnknownMethod refuses calls of methods that are not Modal's.
func (s *Server) refuseUnknownMethod(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return status.Errorf(codes.Unimplemented, "unknown method %s", method)
}

// checkUnknown refuses a message that has a field, at any depth, that its type
// does not define.
func (s *Server) checkUnknown(method string, message any) error {
	known, ok := message.(proto.Message)
	if !ok {
		return nil
	}
	where := unknownField(known.ProtoReflect())
	if where == "" {
		return nil
	}
	what := "unknown field in " + where
	s.calls.recordViolation(method, what)
	return status.Error(codes.InvalidArgument, what)
}

// unknownField returns the name of the first message type that has an unknown
// field, or "".
func unknownField(message protoreflect.Message) (where string) {
	if len(message.GetUnknown()) > 0 {
		return string(message.Descriptor().FullName())
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			if field.MapValue().Message() != nil {
				value.Map().Range(func(_ protoreflect.MapKey, entry protoreflect.Value) bool {
					where = unknownField(entry.Message())
					return where == ""
				})
			}
		case field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				if where = unknownField(value.List().Get(i).Message()); where != "" {
					break
				}
			}
		default:
			where = unknownField(value.Message())
		}
		return where == ""
	})
	return where
}

// requireFields returns an error with code InvalidArgument if the value of a required field is empty. fields alternates
// between names and values.
func requireFields(fields ...string) error {
	for i := 0; i < len(fields); i += 2 {
		if fields[i+1] == "" {
			return status.Errorf(codes.InvalidArgument, "%s is required", fields[i])
		}
	}
	return nil
}

// refuseOtherFields returns an error with code Unimplemented if a field of the message is set that is not in fields,
// the comma-separated names of the fields that mockmodal implements.
func refuseOtherFields(message proto.Message, fields string) error {
	implemented := "," + fields + ","
	var refused error
	message.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if !strings.Contains(implemented, ","+string(field.Name())+",") {
			refused = status.Errorf(codes.Unimplemented, "mockmodal does not implement field %s", field.FullName())
		}
		return refused == nil
	})
	return refused
}
