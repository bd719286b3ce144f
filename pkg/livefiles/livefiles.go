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
	// MaxFile is the size of the largest file, and of the largest listing, that is transferred, in bytes.
	MaxFile = 64 << 20
	// MaxEntries is the largest number of files and folders in a listing.
	MaxEntries = 20_000
	// chunkBytes is the number of bytes of content in one message of a transfer.
	chunkBytes = 256 << 10
	// ackWindow is the number of chunks that may be sent without an acknowledgement.
	ackWindow = 8
	// openWithin is the maximum time that a Source may take to open a file.
	openWithin = 20 * time.Second
	// peerTimeout is the maximum time that one side of a transfer waits for the other.
	peerTimeout = 10 * time.Second
	// maxTransfers is the number of transfers that an executor runs at the same time.
	maxTransfers = 16
)

// header is the kind of a message: the head, a chunk, or a failure during the transfer.
const (
	header      = "Spool-Files"
	headerHead  = "head"
	headerChunk = "chunk"
	headerFail  = "fail"
)

// stopAck is sent as an acknowledgement, instead of a number, by a receiver that wants no more chunks.
const stopAck = "stop"

// Op is what a Request asks for: a file, or a listing.
type Op string

// The operations.
const (
	Get  Op = "get"  // a file's content
	List Op = "list" // the tree below a folder, as a JSON list of Entry
)

// Request asks for a file, or a listing, of a session's running sandbox.
type Request struct {
	Op       Op     `json:"op"`
	Tenant   string `json:"tenant"`
	Session  string `json:"session"`
	Path     string `json:"path"`     // relative to the workspace; "" lists the whole workspace
	Transfer string `json:"transfer"` // token in the subjects of the transfer; set by Client
}

// Entry is a file or a folder in a listing of a running sandbox's workspace.
type Entry struct {
	Path    string    `json:"path"`
	Kind    string    `json:"kind"` // file or dir
	Size    int64     `json:"size"` // bytes
	ModTime time.Time `json:"modTime"`
}

// Code is the reason why an executor refused a Request.
type Code string

// The codes.
const (
	NoSandbox  Code = "NO_LIVE_SANDBOX"
	NotFound   Code = "FILE_NOT_FOUND"
	Outside    Code = "OUTSIDE"
	Unreadable Code = "UNREADABLE"
	TooLarge   Code = "FILE_TOO_LARGE"
	Busy       Code = "BUSY"
	Failed     Code = "FAILED"
)

// Error is returned if the executor refuses a Request.
type Error struct {
	Code   Code   `json:"code"`
	Detail string `json:"detail"`
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Detail) }

// head is the first message with which an executor answers a Request.
type head struct {
	Error *Error `json:"error,omitempty"`
	Size  int64  `json:"size"`
}

// ErrNoExecutor is returned when no executor of the engine responds.
var ErrNoExecutor = errors.New("no executor of the sandbox's engine answers")

// errBroken is returned when a transfer ended before its content was complete.
var errBroken = errors.New("the transfer broke off")
