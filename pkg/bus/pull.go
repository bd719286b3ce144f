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
	// errNoHeartbeat is returned if the server no longer sends heartbeats for a request: the request or its consumer is
	// lost.
	errNoHeartbeat = errors.New("no heartbeat for a pull request")
	// errConsumerMoved is returned if the server stops, or is no longer leader of the consumer.
	errConsumerMoved = errors.New("the server no longer serves the consumer")
)

// Responses of the server that are not messages, by their Status header.
const (
	statusHeartbeat  = "100"
	statusNoMessages = "404"
	statusExpired    = "408"
	statusConflict   = "409"
)

// puller requests as many messages from a consumer as its group has free slots, so that each message that arrives is
// handled at once: a prefetched message would wait without a heartbeat and be redelivered to a second handler. A puller
// has at most one request at a time.
//
// The iterator of nats.go cannot be used for that. In v1.55.0 it has room for as many responses as it requests
// messages, and drops a message that arrives together with the end of a request or with a heartbeat. It also sends no
// request if the goroutine that sent the previous one has not noticed its end yet.
//
// A puller must be used by one goroutine only.
type puller struct {
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

// newPuller returns a puller of a durable, with an inbox of its own. Once the inbox is closed, the server drops the
// requests that name it. slots is the largest number of messages of a request.
func newPuller(js jetstream.JetStream, stream, durable string, expires time.Duration, slots int) (*puller, error) {
	// The end of a short request serves as a heartbeat.
	heartbeat, silent := pullHeartbeat, 2*pullHeartbeat+maxServerDelay
	if expires < silent {
		heartbeat, silent = 0, expires+maxServerDelay
	}
	p := &puller{
		nc: js.Conn(), subject: jetStreamAPIPrefix(js.Options()) + "CONSUMER.MSG.NEXT." + stream + "." + durable,
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

// jetStreamAPIPrefix returns the subject prefix of requests to JetStream.
func jetStreamAPIPrefix(o jetstream.JetStreamOptions) string {
	switch {
	case o.APIPrefix != "":
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	}
	return jetstream.DefaultAPIPrefix
}

// nextMessage blocks until a message arrives. Whenever no request is open and free returns more than 0, it requests
// that many messages. free returns the number of free slots; nextMessage calls free again when it receives from wake.
// After an error the caller must call close.
func (p *puller) nextMessage(ctx context.Context, free func() int, wake <-chan struct{}) (*nats.Msg, error) {
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
			isMessage, err := p.checkResponse(m)
			if isMessage || err != nil {
				return m, err
			}
			silence.Reset(p.silent)
		case <-wake:
		case <-silence.C:
			if p.requested > 0 {
				return nil, errNoHeartbeat
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
func (p *puller) requestMessages(n int) error {
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

// checkResponse reports whether m is a message of the stream. Otherwise m is a response about the request, and the
// error is the reason why the puller must end; it is nil if the puller may continue.
func (p *puller) checkResponse(m *nats.Msg) (isMessage bool, err error) {
	status := m.Header.Get("Status")
	switch {
	case status == "" || len(m.Data) > 0:
		p.requested = max(0, p.requested-1)
		return true, nil
	case status == statusHeartbeat:
		return false, nil
	case status == statusNoMessages || status == statusExpired:
		p.requested = 0
		return false, nil
	}
	why := m.Header.Get("Description")
	if status == statusConflict && (strings.EqualFold(why, "Server Shutdown") || strings.EqualFold(why, "Leadership Change")) {
		return false, errConsumerMoved
	}
	return false, fmt.Errorf("pull: the server responded with %s %s", status, why)
}

// close closes the inbox. It calls returnMessage with each message of the stream that still arrives, so that the caller can
// return the message to the stream.
func (p *puller) close(returnMessage func(*nats.Msg)) {
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
			if isMessage, err := p.checkResponse(m); isMessage && err == nil {
				returnMessage(m)
			}
		default:
			return
		}
	}
}
