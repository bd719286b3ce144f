package agent

import (
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/permission"
)

// maxLinksFollowed is the maximum number of symbolic links that ResolvePath follows to files that do not exist.
const maxLinksFollowed = 40

// ResolvePath converts the path of a tool call to the form that the permission policy checks, with symbolic links
// resolved. path is absolute, or relative to root, the workspace. A path that cannot be resolved counts as outside of
// the workspace, and so does an absolute path below another name of the workspace, such as /workspace, which can be
// another folder for the agent.
func ResolvePath(root, path string) permission.Path {
	real, err := filepath.EvalSymlinks(root)
	if err != nil || path == "" {
		return permission.Path{Path: path, Outside: true}
	}
	abs, named := filepath.Join(real, path), true
	if filepath.IsAbs(path) {
		abs = path
		rel, ok := relativeTo(root, path)
		if ok {
			abs = filepath.Join(real, rel)
		}
		_, named = relativeTo(real, abs)
	}
	abs = resolveLinks(abs)
	rel, ok := relativeTo(real, abs)
	if _, err := workspace.RelativePath(real, abs); !ok || !named || err != nil {
		return permission.Path{Path: abs, Outside: true}
	}
	return permission.Path{Path: filepath.ToSlash(rel)}
}

// resolveLinks returns the absolute path abs with its symbolic links resolved. The last element of abs need not exist.
func resolveLinks(abs string) string {
	rest := ""
	for at, links := filepath.Clean(abs), 0; ; {
		if found, err := filepath.EvalSymlinks(at); err == nil {
			return filepath.Join(found, rest)
		}
		parent := filepath.Dir(at)
		if target, err := readLink(at); err == nil && links < maxLinksFollowed {
			links++
			at = target
			continue
		}
		if parent == at {
			return filepath.Join(at, rest)
		}
		rest, at = filepath.Join(filepath.Base(at), rest), parent
	}
}

// readLink returns the absolute target of a symbolic link.
func readLink(link string) (string, error) {
	target, err := os.Readlink(link)
	if err == nil && !filepath.IsAbs(target) {
		target = filepath.Join(filepath.Dir(link), target)
	}
	return target, err
}

// relativeTo returns path relative to root, and reports whether path is root itself or below it. Both are absolute.
func relativeTo(root, path string) (string, bool) {
	rel, err := filepath.Rel(root, path)
	return rel, err == nil && filepath.IsLocal(rel)
}
