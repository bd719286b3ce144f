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

// callTracker counts the gRPC calls of each method, and holds the errors that tests have injected and the violations of
// Modal's API that clients have committed.
type callTracker struct {
	mu         sync.Mutex
	counts     map[string]int // number of calls by method name, without the service
	faults     []*injectedFault
	violations []apiViolation
}

// injectedFault is an error that a test has injected into calls of a method.
type injectedFault struct {
	Method  string `json:"method"`
	Code    string `json:"code"` // name of a gRPC code, such as UNAVAILABLE
	Message string `json:"message"`
	Count   int    `json:"count"` // number of calls that fail; negative means all until the faults are cleared
	After   bool   `json:"after"` // the call takes effect before it fails
	// RetryAfterSeconds asks the client to repeat the call after that time, as
	// Modal does to slow clients down.
	RetryAfterSeconds float32 `json:"retryAfterSeconds"`
	code              codes.Code
}

// apiViolation is a request that the real Modal would refuse, or that mockmodal does not implement.
type apiViolation struct {
	Time   time.Time `json:"time"`
	Method string    `json:"method"`
	What   string    `json:"what"`
}

// countCall counts a call of a method.
func (c *callTracker) countCall(method string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = map[string]int{}
	}
	c.counts[method]++
}

// addFault injects an error into calls of a method from now on.
func (c *callTracker) addFault(f injectedFault) error {
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

// nextFault returns the injected error with which a call must fail, or nil. after selects the errors that a call
// returns after it has taken effect.
func (c *callTracker) nextFault(method string, after bool) error {
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

// recordViolation records that a client has called a method in a way that Modal would not accept.
func (c *callTracker) recordViolation(method, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.violations = append(c.violations, apiViolation{time.Now().UTC(), method, what})
}

// admitCall counts a gRPC call, checks its credentials, and returns an error that a test has injected. It is called
// before the first message of the call is read.
func (s *Server) admitCall(ctx context.Context, fullMethod string, isStream bool) error {
	s.calls.countCall(path.Base(fullMethod))
	if err := s.authenticate(ctx, fullMethod, isStream); err != nil {
		return err
	}
	return s.calls.nextFault(path.Base(fullMethod), false)
}

// finishCall is called with the result err of a gRPC call, and returns the error for the client. If err is nil, it
// returns an error that a test has injected to follow the effect of the call. It records a violation if err has the
// code Unimplemented.
func (s *Server) finishCall(method string, err error) error {
	if status.Code(err) == codes.Unimplemented {
		s.calls.recordViolation(method, status.Convert(err).Message())
	}
	if err == nil {
		err = s.calls.nextFault(method, true)
	}
	return err
}

// interceptUnary is the gRPC interceptor that checks and counts unary calls.
func (s *Server) interceptUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	if err := s.admitCall(ctx, info.FullMethod, false); err != nil {
		return nil, err
	}
	if err := s.refuseUnknownFields(method, request); err != nil {
		return nil, err
	}
	response, err := handle(ctx, request)
	if err := s.finishCall(method, err); err != nil {
		return nil, err
	}
	return response, nil
}

// interceptStream is the gRPC interceptor that checks and counts streaming calls.
func (s *Server) interceptStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := s.admitCall(stream.Context(), info.FullMethod, true); err != nil {
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

// RecvMsg receives a message, and returns an error if the message has fields that the server does not know.
func (c *checkedStream) RecvMsg(message any) error {
	if err := c.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	return c.server.refuseUnknownFields(c.method, message)
}

// refuseUnknownMethod handles calls of methods that Modal's API does not have. It returns an error with code
// Unimplemented.
func (s *Server) refuseUnknownMethod(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return status.Errorf(codes.Unimplemented, "unknown method %s", method)
}

// refuseUnknownFields returns an error if a message has a field, at any depth, that its type does not define.
func (s *Server) refuseUnknownFields(method string, message any) error {
	known, ok := message.(proto.Message)
	if !ok {
		return nil
	}
	where := findUnknownField(known.ProtoReflect())
	if where == "" {
		return nil
	}
	what := "unknown field in " + where
	s.calls.recordViolation(method, what)
	return status.Error(codes.InvalidArgument, what)
}

// findUnknownField returns the name of the first message type that has an undefined field in message, or "".
func findUnknownField(message protoreflect.Message) (where string) {
	if len(message.GetUnknown()) > 0 {
		return string(message.Descriptor().FullName())
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			if field.MapValue().Message() != nil {
				value.Map().Range(func(_ protoreflect.MapKey, entry protoreflect.Value) bool {
					where = findUnknownField(entry.Message())
					return where == ""
				})
			}
		case field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				if where = findUnknownField(value.List().Get(i).Message()); where != "" {
					break
				}
			}
		default:
			where = findUnknownField(value.Message())
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
