package tool

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/visible"
)

const (
	// maxReadBytes is the maximum number of bytes of a file that one call of the tool for reading returns.
	maxReadBytes = 128 << 10
	// maxFolderEntries is the maximum number of entries that one call of the tool for listing a folder returns.
	maxFolderEntries = 1000
	// maxDiffBytes is the maximum size in bytes of a file, and of its new content, that are compared for a preview.
	maxDiffBytes = 256 << 10
)

// FileTools returns the tools that read and write files and list folders of the workspace.
func FileTools(w *workspace.Workspace) []Tool {
	return []Tool{readFile{w}, writeFile{w}, listDirectory{w}}
}

// readFile is the tool that reads a file of the workspace.
type readFile struct{ w *workspace.Workspace }

// readArguments are the arguments of the tool readFile.
type readArguments struct {
	Path     string `json:"path"`
	Encoding string `json:"encoding"`
	Offset   int64  `json:"offset"`
}

func (readFile) Name() string { return "read_file" }

func (readFile) Description() string {
	return fmt.Sprintf("Reads a file of the workspace, at most %d bytes from the offset on.", maxReadBytes)
}

func (readFile) Schema() json.RawMessage {
	return json.RawMessage(`{"type":"object","additionalProperties":false,"required":["path"],"properties":{
		"path":{"type":"string","description":"relative to the workspace, or below /mnt/workspace"},
		"encoding":{"type":"string","enum":["text","base64"],"description":"text by default; base64 for what is not text"},
		"offset":{"type":"integer","minimum":0,"description":"first byte to read, 0 by default"}}}`)
}

func (readFile) arguments(raw json.RawMessage) (readArguments, error) {
	a := readArguments{Encoding: "text"}
	if err := decodeArguments(raw, &a); err != nil {
		return a, err
	}
	switch {
	case a.Path == "":
		return a, errors.New("path: is empty")
	case a.Encoding != "text" && a.Encoding != "base64":
		return a, fmt.Errorf("encoding: %q is not text or base64", a.Encoding)
	case a.Offset < 0:
		return a, fmt.Errorf("offset: %d is negative", a.Offset)
	}
	return a, nil
}

func (t readFile) Paths(raw json.RawMessage) ([]string, error) {
	a, err := t.arguments(raw)
	return []string{a.Path}, err
}

func (t readFile) Effect(raw json.RawMessage) CallEffect {
	a, err := t.arguments(raw)
	if err != nil {
		return CallEffect{}
	}
	return readEffect("Read "+a.Path, a.Path)
}

// readEffect returns the Effect of a call that reads path.
func readEffect(title, path string) CallEffect {
	return CallEffect{Kind: permission.KindRead, Title: title, Preview: events.ApprovalPreview{Paths: []string{path}}}
}

func (t readFile) Run(_ context.Context, raw json.RawMessage) Result {
	a, err := t.arguments(raw)
	if err != nil {
		return Result{Code: ExecutionError, Output: err.Error()}
	}
	rel, err := t.w.RelativePath(a.Path)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	info, err := t.w.Root().Stat(rel)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	if !info.Mode().IsRegular() { // a pipe would never end
		return Result{Code: InvalidPath, Output: a.Path + " is not a file"}
	}
	f, err := t.w.Root().Open(rel)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	b, err := io.ReadAll(io.NewSectionReader(f, a.Offset, maxReadBytes))
	if err != nil {
		return fileFailure(a.Path, err)
	}
	note := ""
	if rest := info.Size() - a.Offset - int64(len(b)); rest > 0 && len(b) > 0 {
		note = fmt.Sprintf("\n[%d bytes more: read on from offset %d]", rest, a.Offset+int64(len(b)))
	}
	if a.Encoding == "base64" {
		return Result{Output: base64.StdEncoding.EncodeToString(b) + note}
	}
	b = trimIncompleteRunes(b, a.Offset > 0, note != "")
	if !utf8.Valid(b) {
		return Result{Code: ExecutionError, Output: a.Path + " is not text in UTF-8: read it as base64"}
	}
	return Result{Output: string(b) + note}
}

// trimIncompleteRunes returns b without the incomplete runes at those of its ends that were cut.
func trimIncompleteRunes(b []byte, cutBefore, cutAfter bool) []byte {
	for n := 0; cutBefore && n < utf8.UTFMax-1 && len(b) > 0 && !utf8.RuneStart(b[0]); n++ {
		b = b[1:]
	}
	for n := 1; cutAfter && n < utf8.UTFMax && n <= len(b); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				b = b[:len(b)-n]
			}
			break
		}
	}
	return b
}

// writeFile is the tool that writes a file of the workspace.
type writeFile struct{ w *workspace.Workspace }

// writeArguments are the arguments of the tool writeFile.
type writeArguments struct {
	Path     string `json:"path"`
	Content  string `json:"content"`
	Encoding string `json:"encoding"`
}

func (writeFile) Name() string { return "write_file" }

func (writeFile) Description() string {
	return "Writes a file of the workspace whole, in place of what was there; folders are made as needed."
}

func (writeFile) Schema() json.RawMessage {
	return json.RawMessage(`{"type":"object","additionalProperties":false,"required":["path","content"],"properties":{
		"path":{"type":"string","description":"relative to the workspace, or below /mnt/workspace"},
		"content":{"type":"string"},
		"encoding":{"type":"string","enum":["text","base64"],"description":"of content, text by default"}}}`)
}

func (writeFile) arguments(raw json.RawMessage) (a writeArguments, content []byte, err error) {
	a.Encoding = "text"
	if err := decodeArguments(raw, &a); err != nil {
		return a, nil, err
	}
	if a.Path == "" {
		return a, nil, errors.New("path: is empty")
	}
	switch a.Encoding {
	case "text":
		content = []byte(a.Content)
	case "base64":
		if content, err = base64.StdEncoding.DecodeString(a.Content); err != nil {
			return a, nil, fmt.Errorf("content: not base64: %w", err)
		}
	default:
		return a, nil, fmt.Errorf("encoding: %q is not text or base64", a.Encoding)
	}
	return a, content, nil
}

func (t writeFile) Paths(raw json.RawMessage) ([]string, error) {
	a, _, err := t.arguments(raw)
	return []string{a.Path}, err
}

// Effect describes the change that a call would make to the file.
func (t writeFile) Effect(raw json.RawMessage) CallEffect {
	a, content, err := t.arguments(raw)
	if err != nil {
		return CallEffect{}
	}
	e := CallEffect{Kind: permission.KindEdit, Title: "Write " + a.Path, Preview: events.ApprovalPreview{Paths: []string{a.Path}}}
	before, size := t.replacedContent(a.Path)
	switch {
	case !utf8.Valid(content):
		e.Preview.Text = fmt.Sprintf("binary content, %d bytes", len(content))
	case size > 0 && int64(len(before)) == size && utf8.Valid(before) && len(content) <= maxDiffBytes:
		e.Preview.Diff = udiff.Unified(visible.Line("a/"+a.Path), visible.Line("b/"+a.Path), string(before), string(content))
	default:
		e.Preview.Text = string(content)
	}
	return e
}

// replacedContent returns the content of the regular file that a call would replace, and its size. It does not read a
// file of more than maxDiffBytes.
func (t writeFile) replacedContent(path string) (content []byte, size int64) {
	rel, err := t.w.RelativePath(path)
	if err != nil {
		return nil, 0
	}
	info, err := t.w.Root().Stat(rel)
	if err != nil || !info.Mode().IsRegular() {
		return nil, 0
	}
	if info.Size() > maxDiffBytes {
		return nil, info.Size()
	}
	content, err = t.w.Root().ReadFile(rel)
	if err != nil {
		return nil, info.Size()
	}
	return content, int64(len(content))
}

func (t writeFile) Run(_ context.Context, raw json.RawMessage) Result {
	a, content, err := t.arguments(raw)
	if err != nil {
		return Result{Code: ExecutionError, Output: err.Error()}
	}
	rel, n, err := t.w.PutFile(a.Path, strings.NewReader(string(content)), 0o644)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	return Result{Output: fmt.Sprintf("wrote %d bytes to %s", n, rel)}
}

// listDirectory is the tool that lists a folder of the workspace.
type listDirectory struct{ w *workspace.Workspace }

// listArguments are the arguments of the tool listDirectory.
type listArguments struct {
	Path string `json:"path"`
}

func (listDirectory) Name() string { return "list_directory" }

func (listDirectory) Description() string {
	return "Lists a folder of the workspace: one entry a line, folders with a slash at the end, files with their size in bytes."
}

func (listDirectory) Schema() json.RawMessage {
	return json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{
		"path":{"type":"string","description":"relative to the workspace, the workspace itself by default"}}}`)
}

func (listDirectory) Paths(raw json.RawMessage) ([]string, error) {
	var a listArguments
	err := decodeArguments(raw, &a)
	return []string{a.Path}, err
}

func (listDirectory) Effect(raw json.RawMessage) CallEffect {
	var a listArguments
	if err := decodeArguments(raw, &a); err != nil {
		return CallEffect{}
	}
	path := cmp.Or(a.Path, ".")
	return readEffect("List "+path, path)
}

func (t listDirectory) Run(_ context.Context, raw json.RawMessage) Result {
	var a listArguments
	if err := decodeArguments(raw, &a); err != nil {
		return Result{Code: ExecutionError, Output: err.Error()}
	}
	rel, err := t.w.RelativePath(a.Path)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	f, err := t.w.Root().Open(rel)
	if err != nil {
		return fileFailure(a.Path, err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	info, err := f.Stat()
	if err != nil {
		return fileFailure(a.Path, err)
	}
	if !info.IsDir() {
		return Result{Code: InvalidPath, Output: a.Path + " is not a folder"}
	}
	return listFolder(f)
}
