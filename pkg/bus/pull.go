package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Errors that end a pull request in normal operation. The request is repeated.
var (
	// errSilent is returned if the server no longer sends heartbeats for a request: the request or its consumer is
	// lost.
	errSilent = errors.New("no heartbeat for a pull request")
	// errMoved is returned if the server stops, or is no longer leader of the consumer.
	errMoved = errors.New("the server no longer serves the consumer")
)

// Responses of the server that are not messages, by their Status header.
const (
	statusHeartbeat = "100"
	statusNone      = "404"
	statusExpired   = "408"
	statusConflict  = "409"
)

// pull requests as many messages from a consumer as its group has free slots, so that each message that arrives is
// handled at once: a prefetched message would wait without a heartbeat and be redelivered to a second handler. It has
// one request at a time. nats.go's own iterator cannot be used for that. In v1.55.0 it has room for as many responses as
// it requests messages, and drops a message that arrives together with the end of a request or with a heartbeat. It also
// sends no request if the goroutine that sent the previous one has not noticed its end yet.
//
// A pull must be used by one goroutine only.
type pull struct {
	nc      *nats.Conn
	subject string // of requests
	request pullRequest
	silent  time.Duration // maximum time without a heartbeat of a request

	sub       *nats.Subscription
	answers   chan *nats.Msg
	closed    chan struct{} // closed when the server sends nothing more
	status    chan nats.Status
	requested int // messages that the server may still send for the request; 0 if there is no request
}

// pullRequest is the JSON body of a request to NATS for the next messages of a consumer.
type pullRequest struct {
	Batch     int           `json:"batch"`
	Expires   time.Duration `json:"expires"`
	Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
}

// newPull opens a separate inbox: once it is closed, the server drops what was requested through it.
// slots is the largest number of messages of a request.
func newPull(js jetstream.JetStream, stream, durable string, expires time.Duration, slots int) (*pull, error) {
	// The end of a short request serves as a heartbeat.
	heartbeat, silent := pullHeartbeat, 2*pullHeartbeat+pullGrace
	if expires < silent {
		heartbeat, silent = 0, expires+pullGrace
	}
	p := &pull{
		nc: js.Conn(), subject: apiPrefix(js.Options()) + "CONSUMER.MSG.NEXT." + stream + "." + durable,
		request: pullRequest{Expires: expires, Heartbeat: heartbeat}, silent: silent,
		// A request is sent only after the end of the previous one was read, so only its messages, its heartbeats and
		// its end can be queued. After a lost connection the server may still serve the previous request.
		answers: make(chan *nats.Msg, 2*slots+int(2*expires/pullHeartbeat)+4),
		closed:  make(chan struct{}),
	}
	var err error
	if p.sub, err = p.nc.ChanSubscribe(p.nc.NewInbox(), p.answers); err != nil {
		return nil, fmt.Errorf("pull from %s: %w", durable, err)
	}
	// The client calls the handler twice if the connection is closed while the subscription drains.
	closed := sync.OnceFunc(func() { close(p.closed) })
	p.sub.SetClosedHandler(func(string) { closed() })
	p.status = p.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	return p, nil
}

// apiPrefix returns the prefix of requests to JetStream.
func apiPrefix(o jetstream.JetStreamOptions) string {
	switch {
	case o.APIPrefix != "":
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	}
	return jetstream.DefaultAPIPrefix
}

// next blocks until a message arrives. It has one request at a time: whenever there is none and free returns more than
// 0, next requests that many messages. free returns the number of free slots. next calls free again when it receives
// from wake. After an error the caller must call close.
func (p *pull) next(ctx context.Context, free func() int, wake <-chan struct{}) (*nats.Msg, error) {
	silence := time.NewTimer(p.silent)
	defer silence.Stop()
	for {
		if n := free(); p.requested == 0 && n > 0 {
			if err := p.requestMessages(n); err != nil {
				return nil, err
			}
			silence.Reset(p.silent)
		}
		select {
		case m := <-p.answers:
			isMessage, err := p.read(m)
			if isMessage || err != nil {
				return m, err
			}
			silence.Reset(p.silent)
		case <-wake:
		case <-silence.C:
			if p.requested > 0 {
				return nil, errSilent
			}
		case status := <-p.status:
			if status == nats.CLOSED {
				return nil, nats.ErrConnectionClosed
			}
			p.requested = 0 // the request was lost with the connection
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// requestMessages requests the next n messages of the consumer from the NATS server.
func (p *pull) requestMessages(n int) error {
	p.request.Batch = n
	request, err := json.Marshal(p.request)
	if err == nil {
		err = p.nc.PublishRequest(p.subject, p.sub.Subject, request)
	}
	if err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	p.requested = n
	return nil
}

// read reports whether m is a message of the stream. Otherwise m is a response about the request; the error says why the pull must end,
// and is nil if it may continue.
func (p *pull) read(m *nats.Msg) (isMessage bool, err error) {
	status := m.Header.Get("Status")
	switch {
	case status == "" || len(m.Data) > 0:
		p.requested = max(0, p.requested-1)
		return true, nil
	case status == statusHeartbeat:
		return false, nil
	case status == statusNone || status == statusExpired:
		p.requested = 0
		return false, nil
	}
	why := m.Header.Get("Description")
	if status == statusConflict && (strings.EqualFold(why, "Server Shutdown") || strings.EqualFold(why, "Leadership Change")) {
		return false, errMoved
	}
	return false, fmt.Errorf("pull: the server responded with %s %s", status, why)
}

// close closes the inbox. It calls back with each message of the stream that still arrives, so that the caller can
// return the message to the stream.
func (p *pull) close(back func(*nats.Msg)) {
	p.nc.RemoveStatusListener(p.status)
	if err := p.sub.Drain(); err == nil {
		timer := time.NewTimer(drainTimeout)
		defer timer.Stop()
		select {
		case <-p.closed:
		case <-timer.C:
		}
	}
	for {
		select {
		case m := <-p.answers:
			if isMessage, err := p.read(m); isMessage && err == nil {
				back(m)
			}
		default:
			return
		}
	}
}
