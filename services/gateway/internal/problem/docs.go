package problem

import (
	"fmt"
	"strings"
)

// ErrorsMarkdown returns the content of docs/errors.md.
func ErrorsMarkdown() string {
	var s strings.Builder
	s.WriteString(`<!-- Generated from services/gateway/internal/problem by ` + "`make generate`" + `; do not edit. -->
# Errors

Over HTTP an error is ` + "`application/problem+json`" + `: ` + "`{type, title, status, detail, code, field?, tip?, idempotencyKey?}`" + `. On a WebSocket it is
` + "`{\"type\":\"error\", code, message, requestId?, sessionId?, field?, tip?}`" + `; over gRPC a status whose ErrorInfo has the code as its reason.
` + "`code`" + ` is stable; ` + "`detail`" + ` is a sentence for people and may change. A 503 or 429 carries Retry-After, in seconds.

| code | HTTP | gRPC | title | what it means and what to do |
| --- | --- | --- | --- | --- |
`)
	for _, e := range AllCodes() {
		http := "–"
		if e.Status != 0 {
			http = fmt.Sprint(e.Status)
		}
		fmt.Fprintf(&s, "| %s | %s | %s | %s | %s |\n", e.Code, http, e.GRPC, e.Title, e.Doc)
	}
	return s.String()
}
