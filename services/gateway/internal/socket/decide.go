package socket

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxPendingDecisions is the largest number of decisions of a connection that wait for an answer of the session
// service.
const maxPendingDecisions = 16

// parseDecision decodes a message of type approval:decide. Its fields are those of DecideApprovalRequest, besides type, requestId and
// sessionId. With an error it returns the fields that could be decoded, as parse does. The message must be valid JSON.
func parseDecision(data []byte) (clientRequest, error) {
	var r clientRequest
	var all map[string]json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return r, problem.Invalid("type", "the message must be an object")
	}
	for _, field := range []struct { // requestId comes before what may be wrong, because the error contains it
		name string
		into *string
	}{{"requestId", &r.RequestID}, {"type", &r.Type}, {"sessionId", &r.SessionID}} {
		if raw, ok := all[field.name]; ok && json.Unmarshal(raw, field.into) != nil {
			return r, problem.Invalid(field.name, "must be a string")
		}
		delete(all, field.name)
	}
	if len(r.RequestID) > maxRequestIDBytes {
		r.RequestID = ""
		return r, problem.Invalid("requestId", "value is longer than %d bytes", maxRequestIDBytes)
	}
	if r.SessionID != "" {
		if err := reads.CheckSessionID(r.SessionID); err != nil {
			return r, err
		}
	}
	var rest bytes.Buffer
	enc := json.NewEncoder(&rest)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(all); err != nil { // raw JSON always encodes
		return r, problem.From(err)
	}
	r.decision = &spoolv1.DecideApprovalRequest{}
	var wrong *wirejson.FieldError
	if err := wirejson.Unmarshal(rest.Bytes(), r.decision); errors.As(err, &wrong) {
		return r, problem.Invalid(wrong.Field, "%s", wrong.Detail)
	} else if err != nil {
		return r, problem.From(err)
	}
	return r, nil
}

// handleDecision passes a decision of the client to the session service. It does so in its own goroutine, because the
// session service may take seconds, in which the connection must answer pings.
func (c *conn) handleDecision(ctx context.Context, r clientRequest) error {
	select {
	case c.decisions <- struct{}{}:
	default:
		return problem.New(problem.RateLimited, "", "too many decisions of this connection wait for an answer; send fewer at once")
	}
	c.work.Go(func() {
		defer func() { <-c.decisions }()
		position, err := c.handler.cfg.Decide(ctx, c.principal, r.SessionID, r.decision)
		if err != nil {
			_ = c.sendMessage(errorMessage(problem.From(err), r)) // the client may be gone
			return
		}
		_ = c.sendMessage(serverMessage{Type: typeDecided, RequestID: r.RequestID, SessionID: r.SessionID, ApprovalID: r.decision.GetApprovalId(), Position: position}.encode())
	})
	return nil
}
