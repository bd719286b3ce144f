package tool

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// listFolder returns the entries of a folder, sorted by name, as the result of a call.
func listFolder(dir *os.File) Result {
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return fileFailure(dir.Name(), err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	var out strings.Builder
	for i, e := range entries {
		if i == maxFolderEntries {
			fmt.Fprintf(&out, "[%d entries more]\n", len(entries)-i)
			break
		}
		name := strings.ToValidUTF8(e.Name(), "\uFFFD")
		info, err := e.Info()
		switch {
		case e.IsDir():
			fmt.Fprintf(&out, "%s/\n", name)
		case err != nil:
			fmt.Fprintf(&out, "%s\n", name) // it was removed meanwhile
		case e.Type()&fs.ModeSymlink != 0:
			fmt.Fprintf(&out, "%s (link)\n", name)
		default:
			fmt.Fprintf(&out, "%s (%d bytes)\n", name, info.Size())
		}
	}
	if out.Len() == 0 {
		return Result{Output: "[the folder is empty]"}
	}
	return Result{Output: strings.TrimSuffix(out.String(), "\n")}
}
