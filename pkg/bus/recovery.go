package bus

import (
	"fmt"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"
)

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any
	Stack []byte
}

// Error implements error. It omits the stack, which is logged separately.
func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.Value) }

// recovery converts a panic into an error, so that one message cannot end the process.
func recovery() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) (out []*message.Message, err error) {
			defer func() {
				if value := recover(); value != nil {
					err = &PanicError{Value: value, Stack: debug.Stack()}
				}
			}()
			return next(msg)
		}
	}
}
