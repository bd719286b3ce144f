package agent

import (
	"net/http"
	"regexp"
)

// CodeContextExceeded is the code of a turn that failed because the conversation is longer than the model's context window. Later turns fail with it
// too, because they send the same conversation.
const CodeContextExceeded = "MODEL_CONTEXT_EXCEEDED"

// contextExceeded matches the names and the texts with which model APIs and agents say that a conversation is longer than the context window.
var contextExceeded = regexp.MustCompile(`(?i)context[ _-]?(length|window|size)|context exceeds|string_above_max_length|request_too_large|prompt_too_long|` +
	`(prompt|input|request)( token count)?( \([^)]*\))? (is too long|is too large|exceeds)|too many (input )?tokens|reduce the length`)

// ModelErrorCode returns Spool's error code for a failure of the model API: by its HTTP status, 0 if that is not known, and by the name and the text
// of the error.
func ModelErrorCode(status int, text string) string {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return "MODEL_UNAUTHORIZED"
	case http.StatusNotFound:
		return "MODEL_NOT_FOUND"
	case http.StatusTooManyRequests:
		return "MODEL_RATE_LIMITED"
	case http.StatusRequestEntityTooLarge:
		return CodeContextExceeded
	}
	if contextExceeded.MatchString(text) {
		return CodeContextExceeded
	}
	return "MODEL_ERROR"
}
