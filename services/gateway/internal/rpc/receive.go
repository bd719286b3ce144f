package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// receivePieceBytes is the number of bytes of a message that the gateway requests from the transport at once. The
	// client may send that many bytes on top of its window, so that receivePieceBytes bounds the memory that a slow
	// client uses in the transport, and the speed of a distant one.
	receivePieceBytes = 1 << 20
	// maxTopLevelFields is the largest number of fields that a message may have at its top level. An empty list entry
	// takes two bytes on the wire and about a hundred in memory.
	maxTopLevelFields = 20_000
	// messageHeaderLen is the length in bytes of the header before each gRPC message: the compression flag and the
	// length of the message.
	messageHeaderLen = 5
)

// pieceReader is the part of grpc-go's transport stream that reads a message in pieces. grpc-go reads a whole message
// before any option or interceptor sees its length, but its transport can be read in pieces. TestReceive_RefusesBombs
// fails if a later grpc-go does not have these methods.
type pieceReader interface {
	ReadMessageHeader(header []byte) error
	Read(n int) (mem.BufferSlice, error)
}

// errNoPartialReads is returned if a stream of grpc-go does not implement pieceReader.
var errNoPartialReads = errors.New("the gRPC transport does not support partial reads")

// limitedStream is a gRPC stream that takes the bytes of each message from the gateway's limit before it reads the
// message.
type limitedStream struct {
	grpc.ServerStream
	ctx     context.Context
	request *admission.Request
	limit   int // largest message in bytes
	timeout time.Duration
	held    int64 // bytes of the last message
}

// Context returns the stream's context, with the principal.
func (r *limitedStream) Context() context.Context { return r.ctx }

// RecvMsg reads the next message. It returns io.EOF after the client's last message, and INVALID_REQUEST if a message
// takes longer than the timeout; the goroutine that reads then ends together with the call.
func (r *limitedStream) RecvMsg(into any) error {
	r.request.ReturnBytes(r.held)
	r.held = 0
	m, ok := into.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is not a message", into)
	}
	from, ok := grpc.ServerTransportStreamFromContext(r.ctx).(pieceReader)
	if !ok {
		return errNoPartialReads
	}
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := r.readMessage(from)
		done <- result{data, err}
	}()
	timer := time.NewTimer(r.timeout)
	defer timer.Stop()
	select {
	case got := <-done:
		if got.err != nil && r.ctx.Err() != nil { // the call has ended; the transport's own error would hide that
			return r.ctx.Err()
		}
		if got.err != nil {
			return got.err
		}
		return decodeMessage(got.data, m)
	case <-timer.C:
		return problem.Invalid("", "the message did not arrive within %s", r.timeout)
	}
}

// readMessage reads a message in pieces. It takes the bytes of each piece from the gateway's limit before it reads
// the piece.
func (r *limitedStream) readMessage(from pieceReader) ([]byte, error) {
	var header [messageHeaderLen]byte
	if err := from.ReadMessageHeader(header[:]); err != nil {
		return nil, err
	}
	if header[0] != 0 {
		return nil, problem.Invalid("", "the message is compressed; send it uncompressed")
	}
	length := int64(binary.BigEndian.Uint32(header[1:]))
	if length > int64(r.limit) {
		return nil, problem.New(problem.PayloadTooLarge, "", fmt.Sprintf("the message has %d bytes; the limit of this method is %d", length, r.limit))
	}
	var data []byte
	for int64(len(data)) < length {
		n := min(length-int64(len(data)), receivePieceBytes)
		if err := r.request.ReserveBytes(n); err != nil {
			return nil, err
		}
		r.held += n
		piece, err := from.Read(int(n))
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		data = append(data, piece.Materialize()...)
		piece.Free()
	}
	return data, nil
}

// decodeMessage decodes a protobuf message.
func decodeMessage(data []byte, m proto.Message) error {
	rest := data
	for fields := 1; len(rest) > 0; fields++ {
		_, _, n := protowire.ConsumeField(rest)
		if n < 0 {
			return problem.Invalid("", "the message is not valid protobuf")
		}
		if fields > maxTopLevelFields {
			return problem.New(problem.PayloadTooLarge, "", fmt.Sprintf("the message has more than %d fields and entries of lists", maxTopLevelFields))
		}
		rest = rest[n:]
	}
	if err := proto.Unmarshal(data, m); err != nil {
		return problem.Invalid("", "the message does not decode as a request of this method: %s", err)
	}
	return nil
}

// streamRegistrar registers gRPC services so that intercept runs around each of their methods. A method with one
// request is registered as a stream, because grpc-go calls the handler of a stream before it reads a message, but the
// interceptor of a unary method only after it has read the request.
type streamRegistrar struct {
	*grpc.Server
	intercept func(s grpc.ServerStream, method string, streams bool, handle func(grpc.ServerStream) error) error
}

// RegisterService implements grpc.ServiceRegistrar.
func (r streamRegistrar) RegisterService(service *grpc.ServiceDesc, impl any) {
	out := *service
	out.Methods, out.Streams = nil, nil
	for _, m := range service.Methods {
		name := "/" + service.ServiceName + "/" + m.MethodName
		out.Streams = append(out.Streams, grpc.StreamDesc{StreamName: m.MethodName, Handler: func(srv any, s grpc.ServerStream) error {
			return r.intercept(s, name, false, func(s grpc.ServerStream) error {
				answer, err := m.Handler(srv, s.Context(), s.RecvMsg, nil)
				if err != nil {
					return err
				}
				return s.SendMsg(answer)
			})
		}})
	}
	for _, stream := range service.Streams {
		name, handle := "/"+service.ServiceName+"/"+stream.StreamName, stream.Handler
		stream.Handler = func(srv any, s grpc.ServerStream) error {
			return r.intercept(s, name, true, func(s grpc.ServerStream) error { return handle(srv, s) })
		}
		out.Streams = append(out.Streams, stream)
	}
	r.Server.RegisterService(&out, impl)
}
