package skill

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/ignore"
)

// IgnoreFile is the file in a skill's folder that lists, in gitignore syntax, the files that PackFolder leaves out. It
// is left out itself.
const IgnoreFile = ".skillignore"

// DefaultIgnoreRules are ignore rules that apply before those of IgnoreFile, which may revert them.
const DefaultIgnoreRules = ".git\nnode_modules\n.DS_Store\n__pycache__\n"

// maxIgnoreFileSize is the maximum size of IgnoreFile in bytes.
const maxIgnoreFileSize = 64 << 10

// packedEntryTime is the modification time of every entry of a packed ZIP: the earliest time of the ZIP format.
var packedEntryTime = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)

// PackFolder writes a folder's content as a ZIP: sorted, with fixed times, and with only the execute bit of the modes.
// The same files give the same ZIP as long as the compression of the Go version does not change. ignored are
// additional rules, applied after those of the folder's IgnoreFile. PackFolder returns an error that names the first
// symbolic link or special file. It omits folders without content. It does not validate the result. After an error
// w contains a partial ZIP.
func PackFolder(dir string, w io.Writer, ignored string) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("pack a skill: %w", err)
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	own, err := readIgnoreFile(root)
	if err != nil {
		return err
	}
	rules, err := ignore.Parse([]byte(DefaultIgnoreRules + own + "\n" + ignored))
	if err != nil {
		return fmt.Errorf("%s: %w", IgnoreFile, err)
	}
	out := zip.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path == "." || path == IgnoreFile:
			return nil
		case rules.Ignores(path, d.IsDir()):
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return nil
		case d.Type()&fs.ModeSymlink != 0:
			return fmt.Errorf("%s is a symbolic link, which a skill cannot contain: replace it with the file, or add it to %s", quoteName(path), IgnoreFile)
		case !d.Type().IsRegular():
			return fmt.Errorf("%s is neither a file nor a folder: add it to %s", quoteName(path), IgnoreFile)
		}
		return packFile(root, out, path)
	})
	if err == nil {
		err = out.Close()
	}
	if err != nil {
		return fmt.Errorf("pack a skill: %w", err)
	}
	return nil
}

func packFile(root *os.Root, out *zip.Writer, path string) (err error) {
	f, err := root.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() { // it was a regular file when the folder was listed
		return fmt.Errorf("%s is no longer a regular file", quoteName(path))
	}
	h := &zip.FileHeader{Name: path, Method: zip.Deflate, Modified: packedEntryTime}
	h.SetMode(0o644)
	if info.Mode()&unixExecutable != 0 {
		h.SetMode(0o755)
	}
	to, err := out.CreateHeader(h)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, f)
	return err
}

// readIgnoreFile returns the rules of the folder's IgnoreFile, or "" if there is none.
func readIgnoreFile(root *os.Root) (string, error) {
	f, err := root.Open(IgnoreFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", IgnoreFile, err)
	}
	var text bytes.Buffer
	_, err = io.Copy(&text, io.LimitReader(f, maxIgnoreFileSize+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("%s: %w", IgnoreFile, err)
	}
	if text.Len() > maxIgnoreFileSize {
		return "", fmt.Errorf("%s: has more than %d bytes", IgnoreFile, maxIgnoreFileSize)
	}
	return strings.TrimPrefix(text.String(), "\ufeff"), nil
}
