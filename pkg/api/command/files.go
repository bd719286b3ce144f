package command

import (
	"strings"
	"unicode/utf8"
)

// MaxPathLength is the maximum length of a path in a workspace in bytes. maxFileNameLength is the maximum length of a path element,
// which is the limit of common file systems.
const (
	MaxPathLength     = 4096
	maxFileNameLength = 255
)

// sha256HexLength is the length of a hex SHA-256.
const sha256HexLength = 64

// FileObject returns the object name, in the bucket workspaces, of a session's file or archive with the given hex
// SHA-256.
func FileObject(tenant, session, sha256 string) string {
	return ObjectFolder(tenant, session) + "f-" + sha256
}

// ObjectFolder returns the prefix of the names of a session's objects in the bucket workspaces.
func ObjectFolder(tenant, session string) string { return tenant + "/" + session + "/" }

// TranscriptObject returns the object name of the transcript whose conversation a new session continues.
func TranscriptObject(tenant, session string) string {
	return ObjectFolder(tenant, session) + "u-transcript"
}

// CheckPath returns an error unless path is a valid path in a workspace: relative, with slashes, and without leaving
// the workspace. folder allows "", which is the workspace itself.
func CheckPath(field, path string, folder bool) error {
	switch {
	case path == "" && folder:
		return nil
	case path == "":
		return invalidFieldError(field, "is empty; must be a path relative to the workspace")
	case len(path) > MaxPathLength:
		return invalidFieldError(field, "has %d bytes; the limit is %d", len(path), MaxPathLength)
	case !utf8.ValidString(path):
		return invalidFieldError(field, "is not valid UTF-8")
	case strings.ContainsRune(path, 0):
		return invalidFieldError(field, "has a NUL byte")
	case strings.Contains(path, `\`):
		return invalidFieldError(field, `it holds a backslash: write it with slashes`)
	case path[0] == '/':
		return invalidFieldError(field, "must not begin with a slash: the path is relative to the workspace")
	}
	for part := range strings.SplitSeq(path, "/") {
		switch {
		case part == "..":
			return invalidFieldError(field, "must not have a part ..: the path must stay in the workspace")
		case part == "" || part == ".":
			return invalidFieldError(field, "must not have an empty part or a part .; write a/b.txt")
		case len(part) > maxFileNameLength:
			return invalidFieldError(field, "has a path element of %d bytes; the limit is %d", len(part), maxFileNameLength)
		}
	}
	return nil
}

// maxFileMode has every permission bit that a workspace file may have; set-user-ID and set-group-ID are not among them.
const maxFileMode = 0o777

// Check returns an error if the file is invalid. field is the name of the file in the request; tenant and session own
// it.
func (f File) Check(field, tenant, session string) error {
	if err := CheckPath(field+".path", f.Path, f.Archive); err != nil {
		return err
	}
	if f.Mode > maxFileMode {
		return invalidFieldError(field+".mode", "%d is not permission bits; the limit is %d, which is 0777", f.Mode, maxFileMode)
	}
	if len(f.SHA256) != sha256HexLength || strings.Trim(f.SHA256, "0123456789abcdef") != "" {
		return invalidFieldError(field+".sha256", "must be a SHA-256 in hexadecimal digits")
	}
	// An object name in another session's folder would give access to that session's content.
	if f.Object != "" && (!strings.HasPrefix(f.Object, ObjectFolder(tenant, session)) || CheckPath(field, f.Object, false) != nil) {
		return invalidFieldError(field+".object", "%.100q is not an object of the session", f.Object)
	}
	return nil
}
