package harness

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"
)

// Count is a flag for a number of at least 1.
type Count int

// Validate is called by kong.
func (n Count) Validate() error {
	if n < 1 {
		return errors.New("must be positive")
	}
	return nil
}

// CPUTime returns the processor time that this process has used so far, in user mode and in the kernel.
func CPUTime() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("read the processor time of this process: %w", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}

// Median returns the median of at least one number, so that a disk that stalls in one round does not distort a result.
func Median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
}
