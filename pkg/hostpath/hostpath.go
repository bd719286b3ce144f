// Package hostpath decides whether a session may work in a folder of the machine that the server runs on, instead of
// in a workspace of its own.
package hostpath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxPathLength is the length of the longest valid host path in bytes.
const MaxPathLength = 4096

// NoRoots, as the only entry of the setting of allowed folders, disables host paths where they are enabled by default.
const NoRoots = "none"

// ErrNotEnabled is returned for every host path if the server allows none.
var ErrNotEnabled = errors.New("this server does not allow folders of its machine: work on a copy (spool run --copy), or ask the operator to set SPOOL_HOST_PATHS")

// Policy decides in which folders of the server's machine sessions may work. The zero value allows none.
type Policy struct {
	// Roots are absolute paths. These folders and all folders below them are allowed; "/" allows all.
	Roots []string
	// Private are the server's own folders. A folder inside one of them, or one that contains one of them, is
	// refused.
	Private []string
}

// ParseRoots checks the list of folders in which sessions may work. It returns nil for an empty list and for NoRoots.
// Errors begin with the name of the setting.
func ParseRoots(setting string, roots []string) ([]string, error) {
	var out []string
	for _, r := range roots {
		switch {
		case r == "":
		case r == NoRoots && len(roots) == 1:
		case !filepath.IsAbs(r) || checkCharacters(r) != nil:
			return nil, fmt.Errorf("%s: %.100q is not an absolute path: name the folders in which sessions may work, / for all, or %s alone", setting, r, NoRoots)
		default:
			out = append(out, filepath.Clean(r))
		}
	}
	return out, nil
}

// CheckSyntax returns an error if path is not a valid host path. It does not access the file system.
func CheckSyntax(path string) error {
	switch {
	case len(path) > MaxPathLength:
		return fmt.Errorf("has %d bytes; the limit is %d", len(path), MaxPathLength)
	case checkCharacters(path) != nil:
		return checkCharacters(path)
	case !filepath.IsAbs(path):
		return fmt.Errorf("%.100q is not an absolute path", path)
	case filepath.Clean(path) != path:
		return fmt.Errorf("%.100q is not a clean path: write it without .., empty parts and a slash at the end", path)
	}
	return nil
}

func checkCharacters(path string) error {
	if !utf8.ValidString(path) {
		return errors.New("is not valid UTF-8")
	}
	if strings.ContainsFunc(path, unicode.IsControl) {
		return errors.New("has a control character")
	}
	return nil
}

// CheckAndResolve checks that sessions may work in a folder, and returns its path without symbolic links. It returns
// ErrNotEnabled if the policy has no roots.
func (p Policy) CheckAndResolve(path string) (string, error) {
	if len(p.Roots) == 0 {
		return "", ErrNotEnabled
	}
	if err := CheckSyntax(path); err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", unusableFolderError(path, err)
	}
	if err := CheckSyntax(real); err != nil { // a link may lead to an invalid path
		return "", fmt.Errorf("%s leads elsewhere: %w", path, err)
	}
	info, err := os.Stat(real)
	if err != nil {
		return "", unusableFolderError(path, err)
	}
	if !info.IsDir() {
		return "", fmt.Errorf("%s is not a folder", path)
	}
	if err := p.refusePrivate(real); err != nil {
		return "", err
	}
	f, err := os.Open(real)
	if err == nil {
		_, err = f.Readdirnames(1)
		err = errors.Join(ignoreEOF(err), f.Close())
	}
	if err == nil {
		err = checkAccess(real)
	}
	if err != nil {
		return "", unusableFolderError(path, err)
	}
	return real, nil
}

// refusePrivate returns an error if the folder real is, contains or is inside of a private folder of Spool, or is in
// none of the roots.
func (p Policy) refusePrivate(real string) error {
	for _, own := range p.Private {
		own = resolveLinks(own)
		relation := ""
		switch {
		case own == real:
			relation = "is"
		case isWithin(own, real):
			relation = "is in"
		case isWithin(real, own):
			relation = "holds"
		default:
			continue
		}
		return fmt.Errorf("%s %s the folder in which Spool keeps its data (%s), so that each event that Spool writes would be a change of the session's files: choose another folder, or work on a copy (spool run --copy)", real, relation, own)
	}
	for _, root := range p.Roots {
		if isWithin(resolveLinks(root), real) {
			return nil
		}
	}
	return fmt.Errorf("%s is in none of the folders that this server allows (SPOOL_HOST_PATHS)", real)
}

// resolveLinks returns an absolute path without symbolic links. If a link cannot be resolved, the path keeps its links.
func resolveLinks(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}

// isWithin reports whether path is dir or is below it. Both must be absolute and clean.
func isWithin(dir, path string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rel)
}

// unusableFolderError returns an error, on one line, with the reason why a folder cannot be used.
func unusableFolderError(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("there is no folder %s on the server's machine: %w", path, fs.ErrNotExist)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the server may not read and write %s: %w", path, fs.ErrPermission)
	}
	return fmt.Errorf("%s: %w", path, err)
}
