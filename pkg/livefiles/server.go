package livefiles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/topology"
)

// FileSource opens the files of running sandboxes for a Server. It returns a *Error if the client should see the
// reason.
type FileSource interface {
	// Open returns the requested content and its size in bytes. ctx bounds only the call of Open; the content stays
	// readable after ctx has ended.
	Open(ctx context.Context, r Request) (content io.ReadCloser, size int64, err error)
}

// Server responds to requests of Clients for files in the sandboxes of an engine. Several servers may serve one engine.
type Server struct {
	nc     *nats.Conn
	source FileSource
	log    *slog.Logger

	slots   chan struct{}
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
	ctx     context.Context
	cancel  context.CancelFunc
	sub     *nats.Subscription
}

// Serve returns a Server that responds to requests for an engine until Close is called.
func Serve(nc *nats.Conn, provider, engine string, source FileSource, log *slog.Logger) (*Server, error) {
	s := &Server{nc: nc, source: source, log: log, slots: make(chan struct{}, maxTransfers)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	subject := topology.FilesRequestSubject(provider, engine)
	if s.sub, err = nc.QueueSubscribe(subject, "files", s.handleRequest); err != nil {
		s.cancel()
		return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
	}
	return s, nil
}

// Close stops accepting requests, aborts the running transfers and blocks until they have ended.
func (s *Server) Close() error {
	err := s.sub.Unsubscribe()
	if s.nc.IsClosed() {
		err = nil
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.running.Wait()
	return err
}

// handleRequest responds to one request in a new goroutine, or refuses it if too many transfers are running.
func (s *Server) handleRequest(msg *nats.Msg) {
	var r Request
	if err := json.Unmarshal(msg.Data, &r); err != nil || topology.CheckToken("transfer", r.Transfer) != nil {
		s.log.Warn("decode file request", "error", err)
		return
	}
	// The request's own reply subject cannot be used: NATS remaps it between the accounts and lets only one message
	// through.
	to := topology.FilesResponseSubject(r.Transfer)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	select {
	case s.slots <- struct{}{}:
	default:
		s.sendError(to, &Error{CodeBusy, fmt.Sprintf("the executor reads %d files already", maxTransfers)})
		return
	}
	s.running.Go(func() {
		defer func() { <-s.slots }()
		if err := s.sendFile(r, to); err != nil && s.ctx.Err() == nil {
			s.log.Warn("send file of a sandbox", "session", r.Session, "error", err)
		}
	})
}

// sendError responds to a request with an error.
func (s *Server) sendError(reply string, e *Error) {
	raw, err := json.Marshal(responseHead{Error: e})
	if err == nil {
		err = s.sendMessage(reply, headMessage, raw)
	}
	if err != nil {
		s.log.Warn("answer file request", "error", err)
	}
}

func (s *Server) sendMessage(reply, kind string, data []byte) error {
	return s.nc.PublishMsg(&nats.Msg{Subject: reply, Header: nats.Header{messageHeader: {kind}}, Data: data})
}

// sendFile opens the requested content and sends it to the receiver.
func (s *Server) sendFile(r Request, reply string) error {
	ctx, cancel := context.WithTimeout(s.ctx, openTimeout)
	defer cancel()
	content, size, err := s.source.Open(ctx, r)
	if err != nil {
		var refused *Error
		if !errors.As(err, &refused) {
			s.log.Warn("open file of a sandbox", "session", r.Session, "error", err)
			refused = &Error{CodeFailed, "the sandbox's files cannot be read; the executor's log contains the reason"}
		}
		s.sendError(reply, refused)
		return nil
	}
	defer content.Close() //nolint:errcheck // it is only read
	acks := make(chan *nats.Msg, ackWindow+1)
	sub, err := s.nc.ChanSubscribe(topology.FilesAckSubject(r.Transfer), acks)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe() //nolint:errcheck // the connection may be closed
	raw, err := json.Marshal(responseHead{Size: size})
	if err != nil {
		return err
	}
	if err := s.sendMessage(reply, headMessage, raw); err != nil {
		return err
	}
	if err := s.sendChunks(content, size, reply, acks); err != nil && !errors.Is(err, errReceiverStopped) {
		return errors.Join(err, s.sendMessage(reply, failMessage, nil))
	}
	return nil
}

// errReceiverStopped is returned when the receiver of a transfer wants no more chunks.
var errReceiverStopped = errors.New("the receiver stopped")

func (s *Server) sendChunks(content io.Reader, size int64, reply string, acks <-chan *nats.Msg) error {
	buf := make([]byte, chunkSize)
	acked := 0
	for n := 1; size > 0; n++ {
		for n-acked > ackWindow {
			var err error
			if acked, err = s.awaitAck(acks, acked); err != nil {
				return err
			}
		}
		part := buf[:min(size, chunkSize)]
		if _, err := io.ReadFull(content, part); err != nil {
			return err
		}
		if err := s.sendMessage(reply, chunkMessage, part); err != nil {
			return err
		}
		size -= int64(len(part))
	}
	return nil
}

// awaitAck blocks until the receiver acknowledges a chunk and returns the number of the last chunk that it has
// received.
func (s *Server) awaitAck(acks <-chan *nats.Msg, last int) (int, error) {
	timer := time.NewTimer(peerTimeout)
	defer timer.Stop()
	select {
	case m := <-acks:
		if string(m.Data) == stopTransferAck {
			return last, errReceiverStopped
		}
		n, err := strconv.Atoi(string(m.Data))
		if err != nil {
			return last, fmt.Errorf("%w: invalid acknowledgement", errTransferBroken)
		}
		return max(n, last), nil
	case <-timer.C:
		return last, fmt.Errorf("%w: the receiver took nothing for %s", errTransferBroken, peerTimeout)
	case <-s.ctx.Done():
		return last, s.ctx.Err()
	}
}
