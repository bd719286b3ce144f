// Package tool holds the built-in agent's tools. A tool never fails with an
// error: what goes wrong is a result that the model can act upon.
package tool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
)

// Code says what went wrong.
type Code string

// The codes.
const (
	InvalidPath      Code = "INVALID_PATH"
	FileNotFound     Code = "FILE_NOT_FOUND"
	PermissionDenied Code = "PERMISSION_DENIED"
	Timeout          Code = "TIMEOUT"
	ExecutionError   Code = "EXECUTION_ERROR"
)

// Result is what a tool gives back.
type Result struct {
	Output string // for the model and the people who watch; bounded
	Code   Code   // "" when it worked
}

// Text is the result as the model reads it.
func (r Result) Text() string {
	if r.Code == "" {
		return r.Output
	}
	return string(r.Code) + ": " + r.Output
}

// Tool is something that a model can have done.
type Tool interface {
	// Name as the model calls it.
	Name() string
	// Description for the model.
	Description() string
	// Schema is the JSON schema of the arguments.
	Schema() json.RawMessage
	// Paths are the workspace paths that a call touches, for the policy. An error says what is wrong with the arguments.
	Paths(arguments json.RawMessage) ([]string, error)
	// Run does it. It is called only after Paths gave no error.
	Run(ctx context.Context, arguments json.RawMessage) Result
}

// decode reads arguments strictly, so that a model learns of a misspelt field.
func decode(arguments json.RawMessage, into any) error {
	dec := json.NewDecoder(strings.NewReader(string(arguments)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("arguments: %w", err)
	}
	return nil
}

// failure turns an error of the file system into a result.
func failure(path string, err error) Result {
	switch {
	case workspace.Outside(err):
		return Result{Code: PermissionDenied, Output: fmt.Sprintf("%s is outside the workspace", path)}
	case errors.Is(err, fs.ErrNotExist):
		return Result{Code: FileNotFound, Output: fmt.Sprintf("there is no %s", path)}
	case errors.Is(err, fs.ErrPermission):
		return Result{Code: PermissionDenied, Output: fmt.Sprintf("no right to use %s", path)}
	}
	return Result{Code: InvalidPath, Output: err.Error()}
}
