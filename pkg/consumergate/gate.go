// Package consumergate creates JetStream consumers on behalf of the services' NATS accounts. The body of a create
// request names the subject that JetStream delivers to, with the rights of the account that owns JetStream, and NATS
// permissions do not check it. The gate validates the body and forwards only valid requests, in a new encoding.
package consumergate

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// createTimeout is the maximum time that JetStream may take to create a consumer.
	createTimeout = 5 * time.Second
	// subscribeTimeout is the maximum time for which Serve waits until NATS has confirmed its subscription.
	subscribeTimeout = 5 * time.Second
	// maxConcurrentRequests is the number of consumer requests that a gate forwards at the same time.
	maxConcurrentRequests = 64

	gateQueueGroup        = "gate"
	createConsumerSubject = "CONSUMER.CREATE."
	jetStreamAPIPrefix    = "$JS.API."
	// codeUnavailable is JetStream's error code on which clients retry a request.
	codeUnavailable jetstream.ErrorCode = 10008
	// createResponseType is the type of JetStream's response to a create request.
	createResponseType = "io.nats.jetstream.api.v1.consumer_create_response"
)

// createRequest is the body of a request that creates a consumer, as JetStream decodes it. The gate does not forward
// other fields.
type createRequest struct {
	Stream string                   `json:"stream_name"`
	Config jetstream.ConsumerConfig `json:"config"`
	Action string                   `json:"action,omitempty"`
}

// Serve checks requests for JetStream consumers of all services and forwards valid ones to JetStream, until nc is
// closed. nc must be connected as topology.UserGate. Any number of processes may serve at the same time. If NATS does
// not respond while Serve is called, the gate serves when NATS responds again.
func Serve(nc *nats.Conn, log *slog.Logger) error {
	g := &consumerGate{nc: nc, log: log, slots: make(chan struct{}, maxConcurrentRequests)}
	if _, err := nc.QueueSubscribe(topology.GatePrefix+">", gateQueueGroup, g.handleRequest); err != nil {
		return fmt.Errorf("consumer gate: %w", err)
	}
	// Without the gate no service can read, so Serve returns only after the subscription is active, unless NATS does
	// not respond.
	if !nc.IsConnected() {
		return nil
	}
	if err := nc.FlushTimeout(subscribeTimeout); nc.IsClosed() {
		return fmt.Errorf("consumer gate: %w", err)
	} else if err != nil {
		log.Warn("NATS has not confirmed the subscription of the consumer gate yet", "error", err)
	}
	return nil
}

type consumerGate struct {
	nc    *nats.Conn
	log   *slog.Logger
	slots chan struct{}
}

// handleRequest responds to one consumer request. While the maximum number of requests is being forwarded, further
// requests wait in the subscription.
func (g *consumerGate) handleRequest(m *nats.Msg) {
	// NATS remaps every reply subject except those of acknowledgements, and the gate may not publish to those.
	if !strings.HasPrefix(m.Reply, topology.ReplyPrefix) {
		g.log.Warn("consumer request ignored: its reply subject is not one of NATS", "subject", m.Subject, "reply", m.Reply)
		return
	}
	body, err := checkCreateRequest(m.Subject, m.Data)
	if err != nil {
		g.log.Warn("consumer request refused", "subject", m.Subject, "error", err)
		g.respond(m, errorResponse(http.StatusForbidden, 0, err))
		return
	}
	g.slots <- struct{}{}
	go func() {
		defer func() { <-g.slots }()
		g.forwardRequest(m, body)
	}()
}

// forwardRequest forwards a valid consumer request to JetStream and sends the response back. After an error it responds
// with a code on which the client retries.
func (g *consumerGate) forwardRequest(m *nats.Msg, body []byte) {
	_, rest, _ := strings.Cut(strings.TrimPrefix(m.Subject, topology.GatePrefix), ".")
	got, err := g.nc.Request(jetStreamAPIPrefix+rest, body, createTimeout)
	if err != nil {
		g.log.Warn("JetStream did not answer a consumer request", "subject", m.Subject, "error", err)
		g.respond(m, errorResponse(http.StatusServiceUnavailable, codeUnavailable, err))
		return
	}
	g.respond(m, got.Data)
}

func (g *consumerGate) respond(m *nats.Msg, data []byte) {
	if err := g.nc.Publish(m.Reply, data); err != nil {
		g.log.Warn("answer consumer request", "subject", m.Subject, "error", err)
	}
}

// checkCreateRequest checks a request for a consumer and returns the body that is forwarded to JetStream. The body is
// encoded anew, because two JSON parsers may read the same bytes differently.
func checkCreateRequest(subject string, data []byte) ([]byte, error) {
	user, rest, _ := strings.Cut(strings.TrimPrefix(subject, topology.GatePrefix), ".")
	path, ok := strings.CutPrefix(rest, createConsumerSubject)
	if !ok {
		return nil, fmt.Errorf("%s is not a consumer request", subject)
	}
	tokens := strings.SplitN(path, ".", 3)
	if len(tokens) < 2 {
		return nil, fmt.Errorf("%s names no consumer", subject)
	}
	var r createRequest
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("decode body: %w", err)
	}
	if r.Stream != tokens[0] {
		return nil, fmt.Errorf("the body names stream %.64q, the subject %q", r.Stream, tokens[0])
	}
	if err := checkConfig(user, tokens, r.Config); err != nil {
		return nil, err
	}
	r.Config.Name = tokens[1]
	return json.Marshal(r)
}

// checkConfig returns an error for a consumer with a delivery subject outside the user's inboxes, a name or filter that
// differs from the request's subject, or a durable name of another user.
func checkConfig(user string, tokens []string, c jetstream.ConsumerConfig) error {
	stream, name := tokens[0], tokens[1]
	if c.Name != "" && c.Name != name || c.Durable != "" && c.Durable != name {
		return fmt.Errorf("the body names consumer %.64q and durable %.64q, the subject %q", c.Name, c.Durable, name)
	}
	if owner := topology.DurableOwner(stream, name); owner != user && (owner != "" || c.Durable != "") {
		return fmt.Errorf("durable %s of stream %s does not belong to user %s", name, stream, user)
	}
	if len(tokens) == 3 && (c.FilterSubject != tokens[2] || len(c.FilterSubjects) != 0) {
		return fmt.Errorf("the body has the filters %.64q %.64q, the subject %q", c.FilterSubject, c.FilterSubjects, tokens[2])
	}
	if inbox := topology.InboxPrefix(user) + "."; c.DeliverSubject != "" && !strings.HasPrefix(c.DeliverSubject, inbox) {
		return fmt.Errorf("deliver_subject %.64q does not begin with %s", c.DeliverSubject, inbox)
	}
	return nil
}

// errorResponse encodes the reason for which a request is refused as JetStream's clients expect it.
func errorResponse(status int, code jetstream.ErrorCode, reason error) []byte {
	raw, err := json.Marshal(map[string]any{
		"type": createResponseType, "error": jetstream.APIError{Code: status, ErrorCode: code, Description: reason.Error()},
	})
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return raw
}
