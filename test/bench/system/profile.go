package system

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
)

// Profile starts profiles of this process. stop writes the CPU, block, mutex, heap and goroutine profiles into dir. With
// dir "" there are none.
func Profile(dir string) (stop func() error, err error) {
	if dir == "" {
		return func() error { return nil }, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // profiles are not secret
		return nil, err
	}
	cpu, err := os.Create(filepath.Join(dir, "cpu"))
	if err != nil {
		return nil, err
	}
	runtime.SetBlockProfileRate(10_000) // waits of 10 µs and more
	runtime.SetMutexProfileFraction(20)
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, errors.Join(err, cpu.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		errs := []error{cpu.Close()}
		for _, name := range []string{"block", "mutex", "heap", "goroutine"} {
			f, err := os.Create(filepath.Join(dir, name))
			if err == nil {
				err = errors.Join(pprof.Lookup(name).WriteTo(f, 0), f.Close())
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}, nil
}
