//go:build !linux

package snapshot

import "io/fs"

// identity is unknown here: a file is told by its size and time alone.
func identity(fs.FileInfo) (ctime int64, inode uint64) { return 0, 0 }
