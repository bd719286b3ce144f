package topology

import (
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
)

// DeadLetter is a message of DEAD: what was given up, and why.
type DeadLetter struct {
	Sequence  uint64    // in DEAD; it names the letter
	Time      time.Time // when the message was given up
	Subject   string    // that the message was published to
	MessageID string    // of the message, "" where it is not known
	Reason    string    // one sentence
	Handler   string    // that gave it up
	Delivered uint64    // how often it had been delivered
	Payload   []byte

	// Tenant and Session say whose it is, as far as the message tells; "" otherwise.
	Tenant, Session string
}

// ParseDeadLetter reads a message of DEAD.
func ParseDeadLetter(sequence uint64, stored time.Time, subject string, header nats.Header, data []byte) DeadLetter {
	d := DeadLetter{
		Sequence: sequence, Time: stored, Payload: data, Subject: header.Get(HeaderDeadSubject), MessageID: header.Get(HeaderDeadMessageID),
		Reason: header.Get(HeaderDeadReason), Handler: header.Get(HeaderDeadHandler),
	}
	if d.Subject == "" {
		d.Subject = strings.TrimPrefix(subject, Dead(""))
	}
	if n, err := strconv.ParseUint(header.Get(HeaderDeadDelivered), 10, 64); err == nil {
		d.Delivered = n
	}
	if at, err := time.Parse(time.RFC3339Nano, header.Get(HeaderDeadTime)); err == nil {
		d.Time = at
	}
	d.Tenant, d.Session = owner(d.Subject, data)
	return d
}

// owner returns the tenant and the session that a message is about, "" where it names none.
func owner(subject string, data []byte) (tenant, session string) {
	switch kind, _, _ := strings.Cut(subject, "."); kind {
	case "job", "timer":
		if ref, err := DecodeSessionRef(data); err == nil {
			return ref.Tenant, ref.Session
		}
	case "ev":
		if s, err := events.ParseSubject(subject); err == nil {
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

// Retryable reports whether another try has a meaning: the message asked that a session be looked at. A command was
// answered as unknown, and whoever sent it may send it again.
func (d DeadLetter) Retryable() bool { return d.Session != "" && !strings.HasPrefix(d.Subject, "cmd.") }
