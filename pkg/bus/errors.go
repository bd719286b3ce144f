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
	// ErrInvalidMessage means that a message cannot be sent: its subject, or a metadata key or value, is not
	// allowed.
	ErrInvalidMessage = errors.New("bus: invalid message")
	// ErrUnavailable means that the message was certainly not stored because NATS could not be reached; sending it again
	// is safe.
	ErrUnavailable = errors.New("bus: NATS is not available")
	// ErrNoStream means that no stream has the subject, so the message was not stored.
	ErrNoStream = errors.New("bus: no stream has this subject")
	// ErrFull means that the stream or the server has no room and refused the message.
	ErrFull = errors.New("bus: stream is full")
	// ErrTooLarge means that the message exceeds the limit of the server or the stream, so it was not stored and never will be.
	ErrTooLarge = errors.New("bus: message is too large")
	// ErrRefused means that the stream refused the message for another reason, an expected sequence for example; the
	// *jetstream.APIError in the chain has the code.
	ErrRefused = errors.New("bus: message was refused")
	// ErrOutcomeUnknown means that the message was sent, but it is unknown whether it was stored (Publish) or what
	// the command's effect is (Request). A retry must use the same id.
	ErrOutcomeUnknown = errors.New("bus: outcome unknown")
	// ErrNotRouted means that a handler was called without the Router.
	ErrNotRouted = errors.New("bus: handler called without the Router")
)

// PublishError states which message of a call to Publish failed. Messages before Index are stored; the message at
// Index and those after it are not, except that with ErrOutcomeUnknown the message at Index may be stored.
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

// transientError is an error that was marked with Transient, so that its message is delivered again.
type transientError struct{ err error }

func (e *transientError) Error() string { return e.err.Error() }
func (e *transientError) Unwrap() error { return e.err }

// poisonError is an error that was marked with Poison, so that its message becomes a dead letter.
type poisonError struct{ err error }

func (e *poisonError) Error() string { return e.err.Error() }
func (e *poisonError) Unwrap() error { return e.err }

// Transient marks err as temporary: the Router runs the handler again without a redelivery. Transient(nil) is nil.
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

// Poison marks err as permanent: the Router moves the message to DEAD. Poison(nil) is nil.
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

// JetStream's error codes for a full server or account, for which nats.go has no names.
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

// toPublishError converts an error of nats.go for a publish to an error of this package.
func toPublishError(err error) error {
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		return fmt.Errorf("%w: %w", refusalError(api), err)
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return fmt.Errorf("%w: %w", ErrNoStream, err)
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, nats.ErrBadSubject):
		return fmt.Errorf("%w: %w", ErrInvalidMessage, err)
	case errors.Is(err, nats.ErrConnectionDraining), errors.Is(err, nats.ErrReconnectBufExceeded):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	default:
		// Other errors, such as a deadline or a connection that was closed during the wait, may occur after the message was sent
		// and prove nothing. waitConnected reports a connection that was closed before.
		return fmt.Errorf("%w: no acknowledgement from the stream: %w", ErrOutcomeUnknown, err)
	}
}

// refusalError returns the error of this package for a refusal of the stream: ErrFull, ErrTooLarge or ErrRefused.
func refusalError(api *jetstream.APIError) error {
	switch api.ErrorCode {
	case codeAccountFull, codeServerFull, codeMemoryFull, codeStorageFull:
		return ErrFull
	case jetstream.JSErrCodeStreamMessageExceedsMaximum:
		return ErrTooLarge
	case codeStoreFailed:
		// The server uses one code for every failed store; only the text distinguishes the causes (server/store.go, v2.15.2).
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
