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

// What ends a pull request in the ordinary run of things: it is asked again.
var (
	// errSilent is one that the server no longer confirms: it is lost, or its consumer is.
	errSilent = errors.New("no heartbeat for a pull request")
	// errMoved is one whose server stops, or no longer leads the consumer.
	errMoved = errors.New("the consumer's server gives it up")
)

// The answers of the server that are not messages, as the Status header has them.
const (
	statusHeartbeat = "100"
	statusNone      = "404"
	statusExpired   = "408"
	statusConflict  = "409"
)

// pull asks a consumer for one message at a time: a message that was fetched ahead would wait without a heartbeat, and be delivered
// to a second handler. nats.go's own iterator cannot be used for that. In v1.55.0 it has room for as many answers as it asks for
// messages, here one, and drops the message that comes with the end of a request or with a heartbeat in one read; and it sends no
// request when the goroutine that sent the one before has not noted its end yet.
//
// It belongs to one goroutine.
type pull struct {
	nc      *nats.Conn
	subject string // of requests
	request []byte
	silent  time.Duration // how long the server may say nothing of a request

	sub     *nats.Subscription
	answers chan *nats.Msg
	closed  chan struct{} // when the server sends nothing more
	status  chan nats.Status
	asked   bool
	askedAt time.Time
}

// newPull opens an inbox of its own: once it is closed, the server drops what was asked for by it.
func newPull(js jetstream.JetStream, stream, durable string, expires time.Duration) (*pull, error) {
	// The end of a short request is a sign of life itself, and thousands of slots make many heartbeats.
	heartbeat, silent := pullHeartbeat, 2*pullHeartbeat+pullGrace
	if expires < silent {
		heartbeat, silent = 0, expires+pullGrace
	}
	request, err := json.Marshal(struct {
		Batch     int           `json:"batch"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
	}{1, expires, heartbeat})
	if err != nil {
		return nil, fmt.Errorf("pull request: %w", err)
	}
	p := &pull{
		nc: js.Conn(), subject: apiPrefix(js.Options()) + "CONSUMER.MSG.NEXT." + stream + "." + durable,
		request: request, silent: silent,
		// A request is only sent when the end of the one before was read: its heartbeats and its end are all that can wait here.
		answers: make(chan *nats.Msg, 2*expires/pullHeartbeat+4),
		closed:  make(chan struct{}),
	}
	if p.sub, err = p.nc.ChanSubscribe(p.nc.NewInbox(), p.answers); err != nil {
		return nil, fmt.Errorf("pull from %s: %w", durable, err)
	}
	// The client calls it twice when the connection is closed while the subscription drains.
	closed := sync.OnceFunc(func() { close(p.closed) })
	p.sub.SetClosedHandler(func(string) { closed() })
	p.status = p.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	return p, nil
}

// apiPrefix is what requests to JetStream begin with.
func apiPrefix(o jetstream.JetStreamOptions) string {
	switch {
	case o.APIPrefix != "":
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	}
	return jetstream.DefaultAPIPrefix
}

// next waits for a message. After an error the pull is of no more use: close it.
func (p *pull) next(ctx context.Context) (*nats.Msg, error) {
	silence := time.NewTimer(p.silent)
	defer silence.Stop()
	for {
		if err := p.ask(); err != nil {
			return nil, err
		}
		select {
		case m := <-p.answers:
			ours, err := p.read(m)
			if ours || err != nil {
				return m, err
			}
			silence.Reset(p.silent)
		case <-silence.C:
			return nil, errSilent
		case status := <-p.status:
			if status == nats.CLOSED {
				return nil, nats.ErrConnectionClosed
			}
			p.asked = false // the request went with the connection
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (p *pull) ask() error {
	if p.asked {
		return nil
	}
	p.askedAt = time.Now()
	if err := p.nc.PublishRequest(p.subject, p.sub.Subject, p.request); err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	p.asked = true
	return nil
}

// read says whether m is a message of the stream; else it is word of the request.
func (p *pull) read(m *nats.Msg) (ours bool, err error) {
	status := m.Header.Get("Status")
	switch {
	case status == "" || len(m.Data) > 0:
		p.asked = false
		return true, nil
	case status == statusHeartbeat:
		return false, nil
	case status == statusNone || status == statusExpired:
		p.asked = false
		return false, nil
	}
	why := m.Header.Get("Description")
	if status == statusConflict && (strings.EqualFold(why, "Server Shutdown") || strings.EqualFold(why, "Leadership Change")) {
		return false, errMoved
	}
	return false, fmt.Errorf("pull: the server answered %s %s", status, why)
}

// close gives what was on its way to back.
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
			if ours, err := p.read(m); ours && err == nil {
				back(m)
			}
		default:
			return
		}
	}
}
