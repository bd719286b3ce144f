// Package livefiles sends files of running sandboxes from executors to gateways
// over core NATS: a request, a head, and chunks that the receiver acknowledges,
// so that neither side holds more than a window of a file in memory.
package livefiles

import (
	"errors"
	"fmt"
	"time"
)

// Bounds of a transfer.
const (
	// MaxFile is the largest file, and the largest listing, that is sent, in bytes.
	MaxFile = 64 << 20
	// MaxEntries is how many files and folders a listing has.
	MaxEntries = 20_000
	// chunk is the bytes of one message.
	chunk = 256 << 10
	// window is how many chunks are on their way without an acknowledgement.
	window = 8
	// openWithin bounds how long a Source may take to open a file.
	openWithin = 20 * time.Second
	// patience bounds how long either side waits for the other.
	patience = 10 * time.Second
	// maxTransfers is how many transfers an executor has at once.
	maxTransfers = 16
)

// header says what a message of a transfer is: the head, a chunk, or a failure in its middle.
const (
	header      = "Spool-Files"
	headerHead  = "head"
	headerChunk = "chunk"
	headerFail  = "fail"
)

// stop, in place of a number, is the acknowledgement of a receiver that wants no more.
const stop = "stop"

// Op is what is asked for.
type Op string

// The operations.
const (
	Get  Op = "get"  // a file's content
	List Op = "list" // what lies below a folder, as a JSON list of Entry
)

// Request asks for a file, or a listing, of a session's running sandbox.
type Request struct {
	Op       Op     `json:"op"`
	Tenant   string `json:"tenant"`
	Session  string `json:"session"`
	Path     string `json:"path"`     // relative to the workspace; "" lists all of it
	Transfer string `json:"transfer"` // names the subject of acknowledgements; set by Client
}

// Entry is a line of a listing.
type Entry struct {
	Path    string    `json:"path"`
	Kind    string    `json:"kind"` // file or dir
	Size    int64     `json:"size"` // bytes
	ModTime time.Time `json:"modTime"`
}

// Code says why there is no file.
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

// Error is a refusal of the executor's.
type Error struct {
	Code   Code   `json:"code"`
	Detail string `json:"detail"`
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Detail) }

// head is the first message of an answer.
type head struct {
	Error *Error `json:"error,omitempty"`
	Size  int64  `json:"size"`
}

// ErrNoExecutor is returned when no executor of the engine answers.
var ErrNoExecutor = errors.New("no executor of the sandbox's engine answers")

// errBroken is a transfer that ended in its middle.
var errBroken = errors.New("the transfer broke off")
