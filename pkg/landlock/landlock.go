// Package landlock starts processes that cannot open the files of some folders, by the Linux security module Landlock.
//
// Landlock knows only allowed paths. Everything is therefore allowed except the entries of the folders on the way from
// the root of the file system to a hidden folder: of these folders each entry that exists when the process starts is
// allowed, but not the hidden folder. A process can hence neither create nor remove entries of the folders above a
// hidden folder, nor open entries that are created there later. Landlock does not restrict the listing of folders, the
// attributes of files, the execution of files, and connections to sockets.
//
// The process and its descendants also cannot read the memory, the environment and the open files of processes that
// were not started with the same rules; they cannot mount file systems, and they gain no privileges by programs with
// the set-user-ID bit, such as sudo.
package landlock

import "errors"

// MinABI is the first version of Landlock's ABI that Rules can use (Linux 5.19). With the first version no process could
// move a file to another folder.
const MinABI = 2

// ErrUnsupported is returned by Rules.Start if the kernel has no Landlock, has it turned off, or has a version before
// MinABI.
var ErrUnsupported = errors.New("this kernel has no Landlock, or it is turned off (it needs Linux 5.19 and landlock in the parameter lsm=)")

// Rules describe which files a process may open. The zero value hides nothing.
type Rules struct {
	// Hidden are absolute paths of folders whose content cannot be opened, changed or created.
	Hidden []string
	// Visible are absolute paths of existing folders and files inside of hidden folders that are not hidden.
	Visible []string
	// Readable are existing folders inside of hidden folders whose content can be opened, but not changed.
	Readable []string
	// Sockets are existing folders inside of hidden folders in which sockets may be created, and entries removed.
	Sockets []string
}

// Supported reports whether the kernel supports Rules.
func Supported() bool { return ABI() >= MinABI }
