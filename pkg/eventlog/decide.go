package eventlog

import (
	"errors"
	"fmt"
)

// MaxAttempts bounds the attempts of Decide.
const MaxAttempts = 64

// Decide calls attempt until it returns nil or an error other than *ConflictError, and returns that error. An attempt loads the present
// state, decides and appends; *ConflictError means that another writer appended in between. After MaxAttempts conflicts Decide fails
// with an error that is no *ConflictError: the caller gives the command back, to be carried out later.
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
