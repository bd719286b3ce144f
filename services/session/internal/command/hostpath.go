package command

import (
	"errors"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/hostpath"
)

// Codes of refused host paths.
const (
	codeHostPathUnsupported = "HOST_PATH_UNSUPPORTED"
	codeHostPathRefused     = "HOST_PATH_REFUSED"
)

// resolveHostPath returns the host folder in which a new session works, without symbolic links, or "" if the session
// has an ordinary workspace. It refuses a folder that the operator does not allow, and a folder whose identity differs
// from the one that the client sent.
func (h *Handler) resolveHostPath(path string, b command.CreateSession, provider string, agent *events.AgentSpec) (string, error) {
	if path == "" {
		return "", nil
	}
	if provider != "local" {
		return "", hostPathError(codeHostPathUnsupported, errors.New("sandboxes of provider "+provider+" have workspaces of their own: upload the folder (spool run --workspace does)"))
	}
	if agent != nil && len(agent.Files) > 0 {
		return "", hostPathError(codeHostPathRefused, errors.New("the agent's definition has files of its own, which would replace yours: work on a copy (spool run --copy)"))
	}
	resolved, err := h.cfg.HostPaths.CheckAndResolve(path)
	if err != nil {
		return "", hostPathError(codeHostPathRefused, err)
	}
	if b.HostPathIdentity != "" {
		here, err := hostpath.FolderIdentity(resolved)
		if err != nil {
			return "", hostPathError(codeHostPathRefused, err)
		}
		if here != b.HostPathIdentity {
			return "", hostPathError(codeHostPathRefused, errors.New("the server does not see the folder that you see: it runs on another machine, in a container or as another user: work on a copy (spool run --copy)"))
		}
	}
	return resolved, nil
}

// checkHostFiles refuses a command with files if the session works in a folder of the server's machine.
func checkHostFiles(created events.SessionCreated, files []command.File) error {
	if created.Options.HostPath == "" || len(files) == 0 {
		return nil
	}
	return invalidFieldError("workspaceFiles", "the session works in a folder of the server's machine, where they would replace files of yours: put them there yourself, or work on a copy")
}

// hostPathError returns the refusal of a session that works in a host folder, with a code and the message of err.
func hostPathError(code string, err error) error {
	return &command.Error{Code: code, Field: command.FieldHostPath, Detail: err.Error()}
}
