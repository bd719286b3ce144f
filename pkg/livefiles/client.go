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

// Client requests files of running sandboxes from executors. It is safe for concurrent use.
type Client struct{ nc *nats.Conn }

// NewClient returns a Client that sends its requests over nc.
func NewClient(nc *nats.Conn) *Client { return &Client{nc} }

// statusNoResponders is the status that the NATS server sends when a subject has no subscriber.
const statusNoResponders = "503"

// Open requests a file or a listing of a running sandbox from the executors of an engine, and returns the content with
// its size in bytes. The caller must close the content and read it before ctx ends. The error is a *Error if the
// executor refused the request, and wraps ErrNoExecutor if no executor of the engine is listening.
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
	f := &incomingFile{ctx: ctx, nc: c.nc, ack: topology.FilesAckSubject(r.Transfer), messages: make(chan *nats.Msg, ackWindow+2)}
	inbox := topology.FilesResponseSubject(r.Transfer)
	if f.sub, err = c.nc.ChanSubscribe(inbox, f.messages); err != nil {
		return nil, 0, err
	}
	if err := c.nc.PublishRequest(topology.FilesRequestSubject(provider, engine), inbox, raw); err != nil {
		return nil, 0, errors.Join(err, f.sub.Unsubscribe())
	}
	h, err := f.readHead()
	if err != nil {
		return nil, 0, errors.Join(err, f.sub.Unsubscribe())
	}
	f.left = h.Size
	return f, h.Size, nil
}

// incomingFile is a reader of the content that a Client is receiving from an executor.
type incomingFile struct {
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

// nextMessage returns the next message of the transfer. It blocks for the given time at most.
func (f *incomingFile) nextMessage(within time.Duration) (*nats.Msg, error) {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case m := <-f.messages:
		return m, nil
	case <-timer.C:
		return nil, fmt.Errorf("%w: no message for %s", errTransferBroken, within)
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
}

// readHead receives the first message of the transfer.
func (f *incomingFile) readHead() (h responseHead, err error) {
	m, err := f.nextMessage(openTimeout + peerTimeout)
	if err != nil {
		return h, err
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == statusNoResponders {
		return h, ErrNoExecutor
	}
	if m.Header.Get(messageHeader) != headMessage {
		return h, fmt.Errorf("%w: the answer has no head", errTransferBroken)
	}
	if err := json.Unmarshal(m.Data, &h); err != nil {
		return h, fmt.Errorf("%w: %w", errTransferBroken, err)
	}
	if h.Error != nil {
		return h, h.Error
	}
	if h.Size < 0 || h.Size > MaxFileSize {
		return h, fmt.Errorf("%w: invalid size of %d bytes", errTransferBroken, h.Size)
	}
	return h, nil
}

// Read implements io.Reader. A transfer that ends early yields an error, never io.EOF.
func (f *incomingFile) Read(p []byte) (int, error) {
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

// readChunk receives the next chunk of content and acknowledges it.
func (f *incomingFile) readChunk() error {
	m, err := f.nextMessage(peerTimeout)
	switch {
	case err != nil:
		return err
	case m.Header.Get(messageHeader) != chunkMessage, int64(len(m.Data)) > f.left, len(m.Data) == 0:
		return errTransferBroken
	}
	f.part = m.Data
	f.left -= int64(len(m.Data))
	return nil
}

// Close ends the transfer; the executor then stops sending.
func (f *incomingFile) Close() error {
	err := f.sub.Unsubscribe()
	if f.left > 0 {
		err = errors.Join(err, f.nc.Publish(f.ack, []byte(stopTransferAck)))
	}
	if f.nc.IsClosed() {
		return nil
	}
	return err
}
