package command

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/session"
)

// fileCommandBuilder returns the builder for a command that puts files into a session's workspace or removes them.
func fileCommandBuilder(c command.Command) (sessionCommandBuilder, error) {
	switch c.Type {
	case command.TypePutFile:
		var b command.PutFile
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.PutFile{CommandBase: base, FileUpload: sessionFile(c, b.File), Held: l.Run.Snapshot.Applied}, nil
		}, b.Check("file", c.Tenant, c.SessionID)
	default:
		var b command.RemoveFile
		if err := decodeBody(c, &b); err != nil {
			return nil, err
		}
		return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
			return session.RemoveFile{CommandBase: base, Path: b.Path, Held: l.Run.Snapshot.Applied}, nil
		}, command.CheckPath("path", b.Path, false)
	}
}

// checkFiles refuses a command with an invalid uploaded file.
func checkFiles(c command.Command, list []command.File) error {
	for i, f := range list {
		if err := f.Check(fmt.Sprintf("workspaceFiles[%d]", i), c.Tenant, c.SessionID); err != nil {
			return err
		}
	}
	return nil
}

// sessionFiles converts the uploaded files of a command to the form of the session's events.
func sessionFiles(c command.Command, list []command.File) []session.FileUpload {
	var out []session.FileUpload
	for _, f := range list {
		out = append(out, sessionFile(c, f))
	}
	return out
}

// sessionFile converts the uploaded file of a command to the form of the session's events. The file's object has the
// name that the gateway gave it or, if there is none, its SHA-256 as the name.
func sessionFile(c command.Command, f command.File) session.FileUpload {
	if f.Object == "" {
		f.Object = command.FileObject(c.Tenant, c.SessionID, f.SHA256)
	}
	return session.FileUpload{Path: f.Path, Object: f.Object, Size: f.Size, SHA256: f.SHA256, Mode: f.Mode, Archive: f.Archive}
}
