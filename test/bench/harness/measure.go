package harness

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"
)

// PositiveCount is a command line flag for a whole number of at least 1.
type PositiveCount int

// Validate returns an error if n is less than 1. kong, the parser of the command line, calls it.
func (n PositiveCount) Validate() error {
	if n < 1 {
		return errors.New("must be positive")
	}
	return nil
}

// CPUTime calls f, and returns the processor time that this process used meanwhile, in user mode and in the kernel.
func CPUTime(f func() error) (time.Duration, error) {
	var before, after syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
		return 0, fmt.Errorf("read the processor time of this process: %w", err)
	}
	if err := f(); err != nil {
		return 0, err
	}
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
		return 0, fmt.Errorf("read the processor time of this process: %w", err)
	}
	return time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()), nil
}

// Median returns the median of a list of at least one number. Benchmarks use it, so that a disk that stalls in one
// round does not distort a result.
func Median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
}

// MedianBounds returns the bounds of the 95 % confidence interval of the median. They follow from the order of the
// samples, without an assumption about their distribution.
func MedianBounds(list []float64) (low, high float64) {
	list = slices.Sorted(slices.Values(list))
	n := float64(len(list))
	d := 0.98 * math.Sqrt(n)
	return list[max(0, int(n/2-d))], list[min(len(list)-1, int(math.Ceil(n/2+d)))]
}
