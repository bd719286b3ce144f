//go:build !linux

package watch

import "errors"

var errNoNotifier = errors.New("this system has no inotify")

// notifier is not implemented for this system: the watcher polls the workspace instead.
type notifier struct{}

func newNotifier() (*notifier, error)           { return nil, errNoNotifier }
func (*notifier) close() error                  { return nil }
func (*notifier) add(string) (int, error)       { return 0, errNoNotifier }
func (*notifier) remove(int)                    {}
func (*notifier) mark() (int, error)            { return 0, errNoNotifier }
func (*notifier) read([]byte) ([]change, error) { return nil, errNoNotifier }
func isExhausted(error) bool                    { return true }
