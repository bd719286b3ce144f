package system

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
)

// StartProfiles starts to record profiles of this process. stop writes the CPU, block, mutex and allocs profiles into
// the folder dir. If dir is "", it does nothing.
func StartProfiles(dir string) (stop func() error, err error) {
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
		return errors.Join(cpu.Close(), writeProfiles(dir, "block", "mutex", "allocs"))
	}, nil
}

// WriteMemoryProfiles writes the present heap and goroutine profiles of this process, and the sizes of the Go runtime's
// memory, into the folder dir. If dir is "", it does nothing.
func WriteMemoryProfiles(dir string) error {
	if dir == "" {
		return nil
	}
	runtime.GC() // the heap profile is that of the last collection
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	sizes := fmt.Sprintf("goroutines %d\nstacks %d\nlive heap %d\nheap in use %d\nheap free %d\nruntime %d\nnext collection at %d\n",
		runtime.NumGoroutine(), m.StackInuse, m.HeapAlloc, m.HeapInuse, m.HeapIdle-m.HeapReleased, m.GCSys+m.OtherSys+m.MSpanInuse+m.MCacheInuse+m.BuckHashSys, m.NextGC)
	return errors.Join(os.WriteFile(filepath.Join(dir, "memory"), []byte(sizes), 0o644), writeProfiles(dir, "heap", "goroutine")) //nolint:gosec // profiles are not secret
}

// writeProfiles writes each of the named profiles of this process to a file of this name in dir.
func writeProfiles(dir string, names ...string) error {
	var errs []error
	for _, name := range names {
		f, err := os.Create(filepath.Join(dir, name))
		if err == nil {
			err = errors.Join(pprof.Lookup(name).WriteTo(f, 0), f.Close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
