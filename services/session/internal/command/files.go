package command

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/session"
)

// fileBuilder returns the builder of a change of the workspace.
func fileBuilder(c command.Command) (builder, error) {
	switch c.Type {
	case command.TypePutFile:
		var b command.PutFile
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.PutFile{CommandBase: base, FileUpload: sessionFile(c, b.File), Held: l.Run.Snapshot.Applied}, nil
		}, b.Check("file", c.Tenant, c.SessionID)
	default:
		var b command.RemoveFile
		if err := decode(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RemoveFile{CommandBase: base, Path: b.Path, Held: l.Run.Snapshot.Applied}, nil
		}, command.CheckPath("path", b.Path, false)
	}
}

// checkFiles refuses an invalid uploaded file.
func checkFiles(c command.Command, list []command.File) error {
	for i, f := range list {
		if err := f.Check(fmt.Sprintf("workspaceFiles[%d]", i), c.Tenant, c.SessionID); err != nil {
			return err
		}
	}
	return nil
}

func sessionFiles(c command.Command, list []command.File) []session.FileUpload {
	var out []session.FileUpload
	for _, f := range list {
		out = append(out, sessionFile(c, f))
	}
	return out
}

// sessionFile converts an uploaded file. Its object has the name that the gateway gave it or, without one, that of its SHA-256.
func sessionFile(c command.Command, f command.File) session.FileUpload {
	if f.Object == "" {
		f.Object = command.FileObject(c.Tenant, c.SessionID, f.SHA256)
	}
	return session.FileUpload{Path: f.Path, Object: f.Object, Size: f.Size, SHA256: f.SHA256, Mode: f.Mode, Archive: f.Archive}
}
