package livefiles

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/topology"
)

// Client requests files from executors. It is safe for concurrent use.
type Client struct{ nc *nats.Conn }

// NewClient returns a Client that sends its requests over nc.
func NewClient(nc *nats.Conn) *Client { return &Client{nc} }

// statusNoResponders is the status that the NATS server sends when a subject has no subscriber.
const statusNoResponders = "503"

// Open requests content from the executors of an engine, and returns it with its size in bytes. The caller must close
// the content and read it before ctx ends. The error is a *Error if the executor refused the request, and wraps
// ErrNoExecutor if no executor of the engine is listening.
func (c *Client) Open(ctx context.Context, provider, engine string, r Request) (content io.ReadCloser, size int64, err error) {
	// NATS would accept a subject with an empty token and deliver it to nobody.
	if err := errors.Join(topology.CheckToken("provider", provider), topology.CheckToken("engine", engine)); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrNoExecutor, err)
	}
	r.Transfer = rand.Text()
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, 0, err
	}
	f := &file{ctx: ctx, nc: c.nc, ack: topology.FilesAckSubject(r.Transfer), messages: make(chan *nats.Msg, ackWindow+2)}
	inbox := topology.FilesResponseSubject(r.Transfer)
	if f.sub, err = c.nc.ChanSubscribe(inbox, f.messages); err != nil {
		return nil, 0, err
	}
	if err := c.nc.PublishRequest(topology.FilesRequestSubject(provider, engine), inbox, raw); err != nil {
		return nil, 0, errors.Join(err, f.sub.Unsubscribe())
	}
	h, err := f.head()
	if err != nil {
		return nil, 0, errors.Join(err, f.sub.Unsubscribe())
	}
	f.left = h.Size
	return f, h.Size, nil
}

// file is the reader of content that a Client is receiving from an executor.
type file struct {
	ctx      context.Context
	nc       *nats.Conn
	sub      *nats.Subscription
	messages chan *nats.Msg
	ack      string
	part     []byte // unread rest of the current chunk
	taken    int    // number of chunks that were read completely
	left     int64  // bytes that were not received yet
	err      error
}

// next returns the next message. It blocks for the given time at most.
func (f *file) next(within time.Duration) (*nats.Msg, error) {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case m := <-f.messages:
		return m, nil
	case <-timer.C:
		return nil, fmt.Errorf("%w: no message for %s", errBroken, within)
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
}

func (f *file) head() (h head, err error) {
	m, err := f.next(openWithin + peerTimeout)
	if err != nil {
		return h, err
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == statusNoResponders {
		return h, ErrNoExecutor
	}
	if m.Header.Get(header) != headerHead {
		return h, fmt.Errorf("%w: the answer has no head", errBroken)
	}
	if err := json.Unmarshal(m.Data, &h); err != nil {
		return h, fmt.Errorf("%w: %w", errBroken, err)
	}
	if h.Error != nil {
		return h, h.Error
	}
	if h.Size < 0 || h.Size > MaxFile {
		return h, fmt.Errorf("%w: invalid size of %d bytes", errBroken, h.Size)
	}
	return h, nil
}

// Read implements io.Reader. A transfer that breaks off yields an error, never io.EOF.
func (f *file) Read(p []byte) (int, error) {
	for len(f.part) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		if f.left == 0 {
			return 0, io.EOF
		}
		f.err = f.readChunk()
	}
	n := copy(p, f.part)
	if f.part = f.part[n:]; len(f.part) == 0 {
		f.taken++
		if err := f.nc.Publish(f.ack, strconv.AppendInt(nil, int64(f.taken), 10)); err != nil {
			f.err = err
		}
	}
	return n, nil
}

func (f *file) readChunk() error {
	m, err := f.next(peerTimeout)
	switch {
	case err != nil:
		return err
	case m.Header.Get(header) != headerChunk, int64(len(m.Data)) > f.left, len(m.Data) == 0:
		return errBroken
	}
	f.part = m.Data
	f.left -= int64(len(m.Data))
	return nil
}

// Close ends the transfer.
func (f *file) Close() error {
	err := f.sub.Unsubscribe()
	if f.left > 0 {
		err = errors.Join(err, f.nc.Publish(f.ack, []byte(stopAck)))
	}
	if f.nc.IsClosed() {
		return nil
	}
	return err
}
