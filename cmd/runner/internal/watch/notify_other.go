//go:build !linux

package watch

import "errors"

// errNoInotify is returned because only Linux has inotify.
var errNoInotify = errors.New("this system has no inotify")

// inotifyReader is not implemented for this system: the watcher polls the workspace instead.
type inotifyReader struct{}

// newInotifyReader returns errNoInotify.
func newInotifyReader() (*inotifyReader, error)                   { return nil, errNoInotify }
func (*inotifyReader) close() error                               { return nil }
func (*inotifyReader) addWatch(string) (int, error)               { return 0, errNoInotify }
func (*inotifyReader) removeWatch(int)                            {}
func (*inotifyReader) addMark() (int, error)                      { return 0, errNoInotify }
func (*inotifyReader) readChanges([]byte) ([]kernelChange, error) { return nil, errNoInotify }

// isWatchLimitError returns true on this system, so that the watcher polls the workspace.
func isWatchLimitError(error) bool { return true }
