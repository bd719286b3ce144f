package command

import (
	"strings"
	"unicode/utf8"
)

// MaxPath bounds a path in a workspace, in bytes; maxName a part of it, as file systems do.
const (
	MaxPath = 4096
	maxName = 255
)

// sha256Hex is the length of a SHA-256 in hex.
const sha256Hex = 64

// FileObject names content of a session by its SHA-256 (hex) in the bucket workspaces.
func FileObject(tenant, session, sha256 string) string {
	return ObjectFolder(tenant, session) + "f-" + sha256
}

// ObjectFolder is what the names of all of a session's objects begin with.
func ObjectFolder(tenant, session string) string { return tenant + "/" + session + "/" }

// TranscriptObject names the transcript with which a session begins.
func TranscriptObject(tenant, session string) string {
	return ObjectFolder(tenant, session) + "u-transcript"
}

// CheckPath reports what is wrong with a path in a workspace: it is relative,
// with slashes, and stays below the workspace. folder allows "", the workspace itself.
func CheckPath(field, path string, folder bool) error {
	switch {
	case path == "" && folder:
		return nil
	case path == "":
		return invalid(field, "it is empty: give a path relative to the workspace")
	case len(path) > MaxPath:
		return invalid(field, "it has %d bytes; at most %d are taken", len(path), MaxPath)
	case !utf8.ValidString(path):
		return invalid(field, "it is not valid UTF-8")
	case strings.ContainsRune(path, 0):
		return invalid(field, "it holds NUL")
	case strings.Contains(path, `\`):
		return invalid(field, `it holds a backslash: write it with slashes`)
	case path[0] == '/':
		return invalid(field, "it begins with a slash: it is relative to the workspace")
	}
	for part := range strings.SplitSeq(path, "/") {
		switch {
		case part == "..":
			return invalid(field, "it holds a part ..: it must stay in the workspace")
		case part == "" || part == ".":
			return invalid(field, "it holds an empty part, or . in place of one: write a/b.txt")
		case len(part) > maxName:
			return invalid(field, "a part of it has %d bytes; at most %d are taken", len(part), maxName)
		}
	}
	return nil
}

// maxMode is every permission bit that a file of a workspace may have; set-user-id is none of them.
const maxMode = 0o777

// Check reports what is wrong with a file; field names it in the request, tenant and session own it.
func (f File) Check(field, tenant, session string) error {
	if err := CheckPath(field+".path", f.Path, f.Archive); err != nil {
		return err
	}
	if f.Mode > maxMode {
		return invalid(field+".mode", "%d is no permission bits: at most %d, which is 0777", f.Mode, maxMode)
	}
	if len(f.SHA256) != sha256Hex || strings.Trim(f.SHA256, "0123456789abcdef") != "" {
		return invalid(field+".sha256", "it is not a SHA-256 in hex")
	}
	// A reference into another session's folder would be a way to read it.
	if f.Object != "" && (!strings.HasPrefix(f.Object, ObjectFolder(tenant, session)) || CheckPath(field, f.Object, false) != nil) {
		return invalid(field+".object", "%.100q is no object of the session", f.Object)
	}
	return nil
}
