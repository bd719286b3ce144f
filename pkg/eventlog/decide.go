package eventlog

import (
	"errors"
	"fmt"
)

// MaxAttempts is the maximum number of attempts that Decide makes to append after conflicts.
const MaxAttempts = 64

// Decide calls attempt until it returns nil or an error other than *ConflictError, and returns that error. An attempt
// loads the current state, decides and appends; *ConflictError means that another writer appended in between. After
// MaxAttempts conflicts Decide returns an error that is not a *ConflictError, so that the caller returns the command
// to the queue.
func Decide(attempt func() error) error {
	for range MaxAttempts {
		err := attempt()
		var conflict *ConflictError
		if !errors.As(err, &conflict) {
			return err
		}
	}
	return fmt.Errorf("lost the race to other writers %d times", MaxAttempts)
}
