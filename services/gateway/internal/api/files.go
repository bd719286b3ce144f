package api

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// bringing is what all requests with files share.
type bringing interface {
	GetWorkspaceFiles() []*spoolv1.WorkspaceFile
}

// files are files that came with a request: references for the command, and their content.
type files struct {
	refs     []command.File
	contents map[string][]byte // by SHA-256
}

// workspaceFiles checks and decodes the files of a request.
func workspaceFiles(r bringing) (files, error) {
	out := files{contents: map[string][]byte{}}
	at := map[string]bool{}
	for i, f := range r.GetWorkspaceFiles() {
		field := fmt.Sprintf("workspaceFiles[%d]", i)
		data, err := content(field, f)
		if err != nil {
			return out, err
		}
		sum := sha256.Sum256(data)
		ref := command.File{Path: f.GetPath(), Size: uint64(len(data)), SHA256: hex.EncodeToString(sum[:]), Mode: f.GetMode()}
		if err := ref.Check(field, "", ""); err != nil {
			return out, refusal(err)
		}
		if at[ref.Path] {
			return out, problem.Invalid(field+".path", "the path is given twice")
		}
		at[ref.Path] = true
		out.refs, out.contents[ref.SHA256] = append(out.refs, ref), data
	}
	return out, nil
}

// content is what is to stand in a file. An empty file says so: content that is absent was forgotten.
func content(field string, f *spoolv1.WorkspaceFile) ([]byte, error) {
	switch {
	case f.Content != nil && f.ContentBase64 != nil:
		return nil, problem.Invalid(field+".contentBase64", "content and contentBase64 exclude each other")
	case f.Content != nil:
		return []byte(f.GetContent()), nil
	case f.ContentBase64 == nil:
		return nil, problem.Invalid(field+".content", `give content, or contentBase64; an empty file has content ""`)
	}
	data, err := base64.StdEncoding.DecodeString(f.GetContentBase64())
	if err != nil {
		return nil, problem.Invalid(field+".contentBase64", "it is not base64 (A-Z, a-z, 0-9, + and /, padded with =)")
	}
	return data, nil
}

// store gives what puts the contents into the object store; nil where there are none.
func (f files) store(to *objects.Store) func(ctx context.Context, tenant, session string) error {
	if len(f.refs) == 0 {
		return nil
	}
	return func(ctx context.Context, tenant, session string) error {
		for sum, data := range f.contents {
			if err := to.Keep(ctx, command.FileObject(tenant, session, sum), data); err != nil {
				return err
			}
		}
		return nil
	}
}

// existing gives the session, which is the caller's, or SESSION_NOT_FOUND.
func (s *Server) existing(ctx context.Context, id string) (*spoolv1.Session, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if err := reads.CheckSession(id); err != nil {
		return nil, err
	}
	return s.Reads.Session(ctx, p.Tenant, id)
}
