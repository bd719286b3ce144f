package topology

import (
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
)

// DeadLetter is a message of the stream DEAD, with the reason why processing was given up.
type DeadLetter struct {
	Sequence  uint64    // sequence in DEAD, the id of the letter
	Time      time.Time // when processing was given up
	Subject   string    // original subject of the message
	MessageID string    // id of the message; "" if unknown
	Reason    string    // one sentence
	Handler   string    // handler that gave up
	Delivered uint64    // number of deliveries
	Payload   []byte

	// Tenant and Session are the owner of the message; "" if the message names none.
	Tenant, Session string
}

// ParseDeadLetter decodes a message of DEAD.
func ParseDeadLetter(sequence uint64, stored time.Time, subject string, header nats.Header, data []byte) DeadLetter {
	d := DeadLetter{
		Sequence: sequence, Time: stored, Payload: data, Subject: header.Get(HeaderDeadSubject), MessageID: header.Get(HeaderDeadMessageID),
		Reason: header.Get(HeaderDeadReason), Handler: header.Get(HeaderDeadHandler),
	}
	if d.Subject == "" {
		d.Subject = strings.TrimPrefix(subject, DeadSubject(""))
	}
	if n, err := strconv.ParseUint(header.Get(HeaderDeadDelivered), 10, 64); err == nil {
		d.Delivered = n
	}
	if at, err := time.Parse(time.RFC3339Nano, header.Get(HeaderDeadTime)); err == nil {
		d.Time = at
	}
	d.Tenant, d.Session = messageOwner(d.Subject, data)
	return d
}

// parseLogSubject parses a NATS subject of a log with any number of partitions. It returns false for another subject.
func parseLogSubject(subject string) (events.Subject, bool) {
	for n := 1; n <= events.MaxPartitions; n *= 2 {
		if s, err := events.Partitioning(n).ParseSubject(subject); err == nil { //nolint:gosec // at most 64
			return s, true
		}
	}
	return events.Subject{}, false
}

// messageOwner returns the tenant and the session that a dead message names in its subject or data. Each is "" if the
// message does not name it.
func messageOwner(subject string, data []byte) (tenant, session string) {
	switch kind, _, _ := strings.Cut(subject, "."); kind {
	case "job", "timer":
		if ref, err := DecodeSessionRef(data); err == nil {
			return ref.Tenant, ref.Session
		}
	case "ev":
		if s, ok := parseLogSubject(subject); ok {
			if s.Aspect == events.Life || s.Aspect == events.Run {
				return s.Tenant, s.ID
			}
			return s.Tenant, ""
		}
	case "cmd":
		tokens := strings.Split(subject, ".")
		if len(tokens) != 5 || events.CheckTenant("tenant", tokens[3]) != nil {
			return "", ""
		}
		if events.CheckID("session", events.KindSession, tokens[4]) == nil {
			return tokens[3], tokens[4]
		}
		return tokens[3], ""
	}
	return "", ""
}

// IsRetryable reports whether publishing the message again can have an effect: the message asked a service to look at a
// session. Commands are not retried, because their senders received the error that the outcome is unknown, and may have
// sent them again.
func (d DeadLetter) IsRetryable() bool {
	return d.Session != "" && !strings.HasPrefix(d.Subject, "cmd.")
}
