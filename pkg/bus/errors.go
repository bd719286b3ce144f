package bus

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

var (
	// ErrClosed is returned by a Publisher or Subscriber that was closed.
	ErrClosed = errors.New("bus: closed")
	// ErrInvalidMessage means that a message cannot be sent as it is: its subject, or a metadata key or value, is not allowed.
	ErrInvalidMessage = errors.New("bus: invalid message")
	// ErrUnavailable means that the message was certainly not stored because NATS could not be reached; sending it again is safe.
	ErrUnavailable = errors.New("bus: NATS is not available")
	// ErrNoStream means that no stream takes the subject, so the message was not stored.
	ErrNoStream = errors.New("bus: no stream takes this subject")
	// ErrFull means that the stream or the server has no room and refused the message.
	ErrFull = errors.New("bus: stream is full")
	// ErrTooLarge means that the message is larger than the server or the stream takes.
	ErrTooLarge = errors.New("bus: message is too large")
	// ErrRefused means that the stream refused the message for another reason, an expected sequence for example; the
	// *jetstream.APIError in the chain has the code.
	ErrRefused = errors.New("bus: message was refused")
	// ErrOutcomeUnknown means that the message was sent, but whether it was stored (Publish) or what became of the command
	// (Request) is not known. A retry has to carry the same id.
	ErrOutcomeUnknown = errors.New("bus: outcome unknown")
	// ErrNotRouted means that a handler was reached past the Router.
	ErrNotRouted = errors.New("bus: not reached through the Router")
)

// PublishError says which of the messages given to Publish failed. Those before Index are stored; it and those after it are not,
// unless Err is ErrOutcomeUnknown, which leaves it open for the message at Index.
type PublishError struct {
	Index   int    // position among the messages of the call, from 0
	UUID    string // the message's id
	Subject string
	Err     error
}

// Error implements error.
func (e *PublishError) Error() string {
	return fmt.Sprintf("publish message %d (%s) to %s: %v", e.Index, e.UUID, e.Subject, e.Err)
}

// Unwrap returns the cause.
func (e *PublishError) Unwrap() error { return e.Err }

type transientError struct{ err error }

func (e *transientError) Error() string { return e.err.Error() }
func (e *transientError) Unwrap() error { return e.err }

type poisonError struct{ err error }

func (e *poisonError) Error() string { return e.err.Error() }
func (e *poisonError) Unwrap() error { return e.err }

// Transient marks err as one that may be gone in a moment: the Router runs the handler again in place. Transient(nil) is nil.
func Transient(err error) error {
	if err == nil {
		return nil
	}
	return &transientError{err}
}

// IsTransient reports whether err, or an error that it wraps, was marked by Transient.
func IsTransient(err error) bool {
	var t *transientError
	return errors.As(err, &t)
}

// Poison marks err as one that no further delivery can cure: the Router moves the message to DEAD. Poison(nil) is nil.
func Poison(err error) error {
	if err == nil {
		return nil
	}
	return &poisonError{err}
}

// IsPoison reports whether err, or an error that it wraps, was marked by Poison.
func IsPoison(err error) bool {
	var p *poisonError
	return errors.As(err, &p)
}

// JetStream's codes for a server or an account without room; nats.go has no names for them.
const (
	codeAccountFull     jetstream.ErrorCode = 10002
	codeServerFull      jetstream.ErrorCode = 10023
	codeMemoryFull      jetstream.ErrorCode = 10028
	codeStorageFull     jetstream.ErrorCode = 10047
	codeStoreFailed     jetstream.ErrorCode = 10077
	storeFailedMsgs                         = "maximum messages exceeded"
	storeFailedBytes                        = "maximum bytes exceeded"
	storeFailedPerSubj                      = "maximum messages per subject exceeded"
	storeFailedTooLarge                     = "message too large"
)

// publishCause sorts what nats.go returned for a publish into this package's errors.
func publishCause(err error) error {
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		return fmt.Errorf("%w: %w", refusal(api), err)
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return fmt.Errorf("%w: %w", ErrNoStream, err)
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, nats.ErrBadSubject):
		return fmt.Errorf("%w: %w", ErrInvalidMessage, err)
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining), errors.Is(err, nats.ErrReconnectBufExceeded):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	default:
		// Whatever else happens after the bytes may have left, a deadline above all, proves nothing.
		return fmt.Errorf("%w: no acknowledgement from the stream: %w", ErrOutcomeUnknown, err)
	}
}

func refusal(api *jetstream.APIError) error {
	switch api.ErrorCode {
	case codeAccountFull, codeServerFull, codeMemoryFull, codeStorageFull:
		return ErrFull
	case jetstream.JSErrCodeStreamMessageExceedsMaximum:
		return ErrTooLarge
	case codeStoreFailed:
		// The server has one code for every failed store and tells them apart by the text alone (server/store.go, v2.15.2);
		// TestPublisherStreamFull fails if that text changes.
		switch api.Description {
		case storeFailedMsgs, storeFailedBytes, storeFailedPerSubj:
			return ErrFull
		case storeFailedTooLarge:
			return ErrTooLarge
		}
	}
	return ErrRefused
}
