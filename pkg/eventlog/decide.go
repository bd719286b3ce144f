package eventlog

import (
	"errors"
	"fmt"
)

// MaxConflictAttempts is the maximum number of attempts that RetryOnConflict makes to append after conflicts.
const MaxConflictAttempts = 64

// RetryOnConflict calls attempt until it returns nil or an error other than *ConflictError, and returns that error. An
// attempt loads the current state, decides and appends; *ConflictError means that another writer appended in between.
// After MaxConflictAttempts conflicts RetryOnConflict returns an error that is not a *ConflictError, so that the caller
// returns the command to the queue.
func RetryOnConflict(attempt func() error) error {
	for range MaxConflictAttempts {
		err := attempt()
		var conflict *ConflictError
		if !errors.As(err, &conflict) {
			return err
		}
	}
	return fmt.Errorf("lost the race to other writers %d times", MaxConflictAttempts)
}
