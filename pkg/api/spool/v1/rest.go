package spoolv1

import (
	_ "embed"
	"net/http"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// OpenAPI is the description of the REST API in OpenAPI 3.1.
//
//go:embed openapi.json
var OpenAPI []byte

// SuccessStatus returns the HTTP status of a successful call of a method such as "/spool.v1.Sessions/CreateSession":
// 201 if the method creates something, 202 if the request is stored and takes effect later, otherwise 200.
func SuccessStatus(method string) int {
	switch method {
	case Sessions_CreateSession_FullMethodName, Sessions_ForkSession_FullMethodName, Keys_CreateKey_FullMethodName,
		SignIn_CreateSignInCode_FullMethodName, SignIn_ExchangeSignInCode_FullMethodName:
		return http.StatusCreated
	case Sessions_PostMessage_FullMethodName, Sessions_InterruptSession_FullMethodName,
		Sessions_SyncSession_FullMethodName, Sessions_TerminateEnvironment_FullMethodName,
		Executions_StartExecution_FullMethodName, Executions_CancelExecution_FullMethodName,
		Executions_PauseExecution_FullMethodName, Executions_ResumeExecution_FullMethodName, Executions_TerminateExecution_FullMethodName,
		Executions_RecoverExecution_FullMethodName, Approvals_DecideApproval_FullMethodName:
		return http.StatusAccepted
	}
	return http.StatusOK
}

// ResponseStatus returns the HTTP status of a successful response: that of SuccessStatus, or 200 for the response to a
// request that has waited until its execution ended.
func ResponseStatus(method string, response proto.Message) int {
	if r, ok := response.(interface{ GetExecution() *Execution }); ok && HasEnded(r.GetExecution()) {
		return http.StatusOK
	}
	return SuccessStatus(method)
}

// HasEnded reports whether an execution has ended. It is false for nil.
func HasEnded(e *Execution) bool {
	return slices.Contains([]string{"completed", "failed", "cancelled"}, e.GetPhase())
}

// IsQueryParameter reports whether a field of a request with a body is a parameter of the query over REST, and not a
// field of the body.
func IsQueryParameter(field protoreflect.FullName) bool {
	return field == "spool.v1.PostMessageRequest.wait" || field == "spool.v1.StartExecutionRequest.wait"
}

// HoldsReference reports whether a field of a request or response holds references to catalogue entries. Over REST each
// reference is a string, or an object with the fields of Reference and kind.
func HoldsReference(field protoreflect.FullName) bool {
	switch field {
	case "spool.v1.ForkSessionRequest.agent", "spool.v1.CreateSessionRequest.agent", "spool.v1.CreateSessionRequest.agent_profile_ref",
		"spool.v1.CreateSessionRequest.instance", "spool.v1.CreateSessionRequest.environments",
		"spool.v1.StartExecutionRequest.agent", "spool.v1.StartExecutionRequest.agent_profile_ref",
		"spool.v1.StartExecutionRequest.instance", "spool.v1.StartExecutionRequest.environments",
		"spool.v1.ExplainEnvironmentRequest.agent", "spool.v1.ExplainEnvironmentRequest.instance", "spool.v1.ExplainEnvironmentRequest.environments":
		return true
	}
	return false
}

// TakesIdempotencyKey reports whether the server evaluates the Idempotency-Key of a method. It does so for methods that
// create something on each call and for DecideApproval, which is refused after a decision. Repeating any other method
// has no effect.
func TakesIdempotencyKey(method string) bool {
	return slices.Contains([]string{
		Sessions_CreateSession_FullMethodName, Sessions_ForkSession_FullMethodName, Sessions_PostMessage_FullMethodName, Executions_StartExecution_FullMethodName,
		Executions_RecoverExecution_FullMethodName, Approvals_DecideApproval_FullMethodName,
	}, method)
}
