// Package tool holds the built-in agent's tools. A tool does not return Go errors: a failure is a result that the model
// can act on.
package tool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// FailureCode is the error code of a tool call that failed.
type FailureCode string

// The codes.
const (
	InvalidPath      FailureCode = "INVALID_PATH"
	FileNotFound     FailureCode = "FILE_NOT_FOUND"
	PermissionDenied FailureCode = "PERMISSION_DENIED"
	Timeout          FailureCode = "TIMEOUT"
	ExecutionError   FailureCode = "EXECUTION_ERROR"
)

// Result is the result of a tool call.
type Result struct {
	Output string      // for the model and for observers; limited in length
	Code   FailureCode // "" for success
}

// ModelText returns the result in the form that the model reads, with the code before the output of a failure.
func (r Result) ModelText() string {
	if r.Code == "" {
		return r.Output
	}
	return string(r.Code) + ": " + r.Output
}

// Tool is a tool that the model can call. The built-in tools and the tools of MCP servers implement it.
type Tool interface {
	// Name returns the name that the model uses.
	Name() string
	// Description returns the description for the model.
	Description() string
	// Schema returns the JSON schema of the arguments.
	Schema() json.RawMessage
	// Paths returns the workspace paths that a call uses, for the policy. It returns an error if the arguments are
	// invalid.
	Paths(arguments json.RawMessage) ([]string, error)
	// Effect describes what a call would do. It is called only if Paths returned no error for the arguments.
	Effect(arguments json.RawMessage) CallEffect
	// Run runs the call. It is called only if Paths returned no error.
	Run(ctx context.Context, arguments json.RawMessage) Result
}

// CallEffect describes what a tool call would do, for the permission policy and for the person who decides. Its texts may
// have any size.
type CallEffect struct {
	Kind        permission.CallKind
	Command     string // shell command, for kind shell
	Destructive bool   // the call would destroy data
	Title       string // one line, made from the call
	Words       string // what the server of the tool calls it, which nobody has checked
	Preview     events.ApprovalPreview
}

// decodeArguments decodes the arguments of a call, and refuses unknown fields, so that the model learns about a
// misspelt one.
func decodeArguments(arguments json.RawMessage, into any) error {
	dec := json.NewDecoder(strings.NewReader(string(arguments)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("arguments: %w", err)
	}
	return nil
}

// fileFailure converts an error of the file system about path to the result of a call.
func fileFailure(path string, err error) Result {
	switch {
	case workspace.IsOutside(err):
		return Result{Code: PermissionDenied, Output: fmt.Sprintf("%s is outside the workspace", path)}
	case errors.Is(err, fs.ErrNotExist):
		return Result{Code: FileNotFound, Output: fmt.Sprintf("there is no %s", path)}
	case errors.Is(err, fs.ErrPermission):
		return Result{Code: PermissionDenied, Output: fmt.Sprintf("no right to use %s", path)}
	}
	return Result{Code: InvalidPath, Output: err.Error()}
}
