// Package livefiles transfers files of running sandboxes from executors to gateways over core NATS. A transfer is a
// request, a head, and chunks that the receiver acknowledges, so that neither side holds more than a window of a file
// in memory.
package livefiles

import (
	"errors"
	"fmt"
	"time"
)

// Limits of a transfer.
const (
	// MaxFileSize is the maximum size in bytes of a file, and of a listing, that an executor transfers.
	MaxFileSize = 64 << 20
	// MaxListingEntries is the largest number of files and folders in a listing.
	MaxListingEntries = 20_000
	// chunkSize is the number of bytes of a file in one message of a transfer.
	chunkSize = 256 << 10
	// ackWindow is the number of chunks that may be sent without an acknowledgement.
	ackWindow = 8
	// openTimeout is the maximum time that a FileSource may take to open a file.
	openTimeout = 20 * time.Second
	// peerTimeout is the maximum time that one side of a transfer waits for the other.
	peerTimeout = 10 * time.Second
	// maxTransfers is the number of transfers that an executor runs at the same time.
	maxTransfers = 16
)

// messageHeader is the kind of a message: the head, a chunk, or a failure during the transfer.
const (
	messageHeader = "Spool-Files"
	headMessage   = "head"
	chunkMessage  = "chunk"
	failMessage   = "fail"
)

// stopTransferAck is the acknowledgement that a receiver sends, instead of the number of a chunk, if it wants no more
// chunks.
const stopTransferAck = "stop"

// Operation is the operation that a Request requests: the content of a file, or a listing.
type Operation string

// The operations.
const (
	OpGetFile   Operation = "get"  // a file's content
	OpListFiles Operation = "list" // the tree below a folder, as a JSON list of Entry
)

// Request requests a file, or a listing, of a session's running sandbox.
type Request struct {
	Op       Operation `json:"op"`
	Tenant   string    `json:"tenant"`
	Session  string    `json:"session"`
	Path     string    `json:"path"`     // relative to the workspace; "" lists the whole workspace
	Transfer string    `json:"transfer"` // token in the subjects of the transfer; set by Client
}

// Entry is a file or a folder in a listing of the workspace in a running sandbox.
type Entry struct {
	Path    string    `json:"path"`
	Kind    string    `json:"kind"` // file or dir
	Size    int64     `json:"size"` // bytes
	ModTime time.Time `json:"modTime"`
}

// ErrorCode is the reason why an executor refused a Request.
type ErrorCode string

// The codes.
const (
	CodeNoSandbox        ErrorCode = "NO_LIVE_SANDBOX"
	CodeNotFound         ErrorCode = "FILE_NOT_FOUND"
	CodeOutsideWorkspace ErrorCode = "OUTSIDE"
	CodeUnreadable       ErrorCode = "UNREADABLE"
	CodeTooLarge         ErrorCode = "FILE_TOO_LARGE"
	CodeBusy             ErrorCode = "BUSY"
	CodeFailed           ErrorCode = "FAILED"
)

// Error is returned if the executor refuses a Request.
type Error struct {
	Code   ErrorCode `json:"code"`
	Detail string    `json:"detail"`
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Detail) }

// responseHead is the first message of an executor's response to a Request.
type responseHead struct {
	Error *Error `json:"error,omitempty"`
	Size  int64  `json:"size"`
}

// ErrNoExecutor is returned when no executor of the engine responds.
var ErrNoExecutor = errors.New("no executor of the sandbox's engine answers")

// errTransferBroken is returned when a transfer ended before its content was complete.
var errTransferBroken = errors.New("the transfer broke off")
